"""The prediction for a traced run: simulated step and predicted traffic."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.spec.foreign_text import echo
from shardwise.spec.record import SpecError
from shardwise.step.profile import CollectiveProfile, read_profile_file

if TYPE_CHECKING:
    from shardwise.observe.rank.summary import RankSummary
    from shardwise.observe.rules import Rules
    from shardwise.step.comparison import Term
    from shardwise.step.spans import Timeline


class RunPrediction(NamedTuple):
    """The simulated step of a run (None if its time is unknown), and its traffic per step."""

    simulated: Timeline | None
    traffic: tuple[CollectiveProfile, ...]

    @classmethod
    def of(cls, run: Path | None, files: list[Path]) -> RunPrediction | None:
        """The prediction for run.toml `run`, or for the run folder that is the only file.

        None if there is no run.
        """
        from shardwise.predict.api import estimate_run, replay_run
        from shardwise.spec.run import read_run

        folder = files[0] if len(files) == 1 and (files[0] / "run.toml").is_file() else None
        file = run or (folder / "run.toml" if folder else None)
        if file is None:
            return None
        described = read_run(file).resolved()
        saved = (folder or file.parent) / "prediction.json"
        traffic = (read_profile_file(saved) if folder else estimate_run(described)).traffic
        return cls(replay_run(described), traffic)

    def to_dict(self, rank: RankSummary) -> dict[str, Any]:
        """Simulated against measured as JSON, per step; times are in nanoseconds."""
        from shardwise.observe.against import compare_rank, traffic_terms

        compared = compare_rank(self.simulated, rank) if self.simulated is not None else None
        terms = [*(compared.terms if compared else []), *traffic_terms(self.traffic, rank)]
        units = {u.unit: list(map(_term_json, u.terms)) for u in compared.units} if compared else {}
        return {"against": {"terms": list(map(_term_json, terms)), "units": units}}

    def show(self, rank: RankSummary) -> None:
        """Print the simulated step against the measured steps of a rank."""
        from shardwise.observe.against import compare_rank, traffic_terms
        from shardwise.report.against import print_rank_comparison
        from shardwise.report.screen import screen

        compared = compare_rank(self.simulated, rank) if self.simulated is not None else None
        print_rank_comparison(screen(), compared, traffic_terms(self.traffic, rank), rank.name)

    def check(self, path: Path) -> None:
        """Raise SpecError for a timeline that cannot be written, before traces are read."""
        if self.simulated is None:
            raise SpecError(
                "--timeline: the step time of this run cannot be predicted; leave --timeline out"
            )
        if not path.parent.is_dir():
            raise SpecError(f"--timeline: folder {path.parent} does not exist; create it first")

    def write(self, rank: RankSummary, rules: Rules, path: Path) -> None:
        """Write a simulated and a measured step into one file for Perfetto.

        The measured step is that of median length of the rank.
        """
        from shardwise.observe.against import chrome_comparison
        from shardwise.observe.rank.summary import summarise_rank
        from shardwise.step.chrome import write_events

        assert self.simulated is not None  # see check
        measured = summarise_rank(rank.path, rules, timeline=True).timeline
        assert measured is not None
        windows = sorted(rank.windows or [rank.span], key=lambda w: w[1] - w[0])
        events = chrome_comparison(self.simulated, measured, windows[len(windows) // 2])
        write_events(path, events, {"kind": "simulated and measured"})
        echo(f"Wrote both steps to {path}; open it in ui.perfetto.dev.", err=True)


def _term_json(term: Term) -> dict[str, Any]:
    """A term as a JSON object, predicted and measured."""
    return {"name": term.name, "predicted": term.first, "measured": term.second}
