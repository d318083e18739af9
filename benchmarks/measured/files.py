"""Read the contributions in benchmarks/measured/runs: one folder per source, one file per run."""

from __future__ import annotations

import hashlib
import json
import math
import re
from pathlib import Path
from typing import NamedTuple

from shardwise.runs.contribution.check import impossible_numbers
from shardwise.runs.contribution.record import Contribution
from shardwise.spec.read_file import read_json
from shardwise.spec.record import SpecError

RUNS = Path(__file__).resolve().parent / "runs"
# A record is a few kilobytes.
MOST_BYTES = 65_536
# Two runs agree in every time to four digits only if one is a copy of the other.
SAME_TIME = 1e-4
_SOURCE = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")
# A name is a text too: no spaces, no line breaks.
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}\.json")


class Entry(NamedTuple):
    """One contributed run; `source` is the folder, a group of runs that are not independent."""

    path: Path
    source: str
    run: Contribution

    @property
    def fingerprint(self) -> str:
        """A digest of what ran and what was measured; versions and predictions do not count."""
        record = self.run.to_dict()
        kept = {key: record.get(key) for key in ("hardware", "model", "job", "strategy")}
        measured = {key: record["measured"].get(key) for key in ("time", "memory", "traffic")}
        text = json.dumps([kept, measured], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def repeats(self, other: Entry) -> bool:
        """Whether both are one run: the same layout and shapes on the same devices, same times."""
        return self._setting == other._setting and self._same_times(other)

    @property
    def _setting(self) -> tuple[object, ...]:
        run, hardware = self.run, self.run.hardware
        where = (hardware.label, hardware.nodes, hardware.devices_per_node)
        return (*where, run.model, run.parameters, run.adapter, run.job, run.strategy)

    def _same_times(self, other: Entry) -> bool:
        mine, theirs = self.run.measured.time, other.run.measured.time
        if mine is None or theirs is None:
            return False
        ends = zip(mine.step_s_spread or (), theirs.step_s_spread or (), strict=False)
        pairs = [(mine.step_s, theirs.step_s), *ends]
        return all(math.isclose(one, two, rel_tol=SAME_TIME) for one, two in pairs)


class Checked(NamedTuple):
    """Valid contributions, and a sentence for each problem of the others."""

    entries: list[Entry]
    problems: list[str]


def check(folder: Path = RUNS) -> Checked:
    """Read and check every file: schema, names, impossible numbers, duplicates."""
    entries: list[Entry] = []
    problems: list[str] = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        where = path.relative_to(folder).as_posix()
        try:
            entry = _read(path, where)
        except SpecError as error:
            problems += error.problems
            continue
        wrong = [f"{where}: {problem}" for problem in impossible_numbers(entry.run)]
        first = next((other.path for other in entries if entry.repeats(other)), None)
        if first is not None:
            wrong.append(
                f"{where}: is a duplicate of {first.relative_to(folder).as_posix()}: the same run, "
                "the same measurement"
            )
        problems += wrong
        entries += [] if wrong else [entry]
    return Checked(entries, problems)


def _read(path: Path, where: str) -> Entry:
    source, _, name = where.rpartition("/")
    if not _SOURCE.fullmatch(source) or not _FILE.fullmatch(name):
        raise SpecError(
            f"{where}: must be runs/SOURCE/NAME.json, the source in [a-z0-9-], the name in "
            "[A-Za-z0-9._-]"
        )
    if path.stat().st_size > MOST_BYTES:
        raise SpecError(f"{where}: is larger than {MOST_BYTES:,} bytes; a record is smaller")
    return Entry(path, source, Contribution.of_file(read_json(path, where), where))
