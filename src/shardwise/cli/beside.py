"""What was predicted of a run whose trace is looked at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import typer

from shardwise.spec.record import SpecError
from shardwise.step import CollectiveProfile, read_profile_file

if TYPE_CHECKING:
    from shardwise.observe.rank.summary import RankSummary
    from shardwise.observe.rules import Rules
    from shardwise.timeline.spans import Timeline


class Beside(NamedTuple):
    """The simulated step of a run, where its time can be known, and its predicted traffic."""

    simulated: Timeline | None
    traffic: tuple[CollectiveProfile, ...]

    @classmethod
    def of(cls, run: Path | None, files: list[Path]) -> Beside | None:
        """Of the run that was named, or of the one run whose folder was given."""
        from shardwise.api import estimate_run, replay_run
        from shardwise.spec.run import read_run

        folder = files[0] if len(files) == 1 and (files[0] / "run.toml").is_file() else None
        file = run or (folder / "run.toml" if folder else None)
        if file is None:
            return None
        described = read_run(file)
        described = described.resolved()
        kept = (folder or file.parent) / "prediction.json"
        traffic = (read_profile_file(kept) if folder else estimate_run(described)).traffic
        return cls(replay_run(described), traffic)

    def to_dict(self, rank: RankSummary) -> dict[str, Any]:
        from shardwise.observe.against import against, traffic_terms

        found = against(self.simulated, rank) if self.simulated is not None else None
        terms = [*(found.terms if found else []), *traffic_terms(self.traffic, rank)]
        units = {u.unit: [t._asdict() for t in u.terms] for u in found.units} if found else {}
        return {"against": {"terms": [t._asdict() for t in terms], "units": units}}

    def show(self, rank: RankSummary) -> None:
        from shardwise.observe.against import against, traffic_terms
        from shardwise.report.against import print_against
        from shardwise.report.screen import screen

        found = against(self.simulated, rank) if self.simulated is not None else None
        print_against(screen(), found, traffic_terms(self.traffic, rank), rank.name)

    def check(self, path: Path) -> None:
        """Refuse what cannot be written, before anything is read."""
        if self.simulated is None:
            raise SpecError("--timeline: the time of this step is not known, so it cannot be drawn")
        if not path.parent.is_dir():
            raise SpecError(f"--timeline: there is no folder {path.parent}")

    def write(self, rank: RankSummary, rules: Rules, path: Path) -> None:
        """Both steps in one file; of the measured ones the middle by length."""
        from shardwise.observe.against import side_by_side
        from shardwise.observe.rank.summary import summarise_rank
        from shardwise.timeline.chrome import write_events

        assert self.simulated is not None  # see check
        measured = summarise_rank(rank.path, rules, timeline=True).timeline
        assert measured is not None
        windows = sorted(rank.windows or [rank.span], key=lambda w: w[1] - w[0])
        events = side_by_side(self.simulated, measured, windows[len(windows) // 2])
        write_events(path, events, {"kind": "simulated and measured"})
        typer.echo(f"Both steps are in {path}; ui.perfetto.dev opens it.", err=True)
