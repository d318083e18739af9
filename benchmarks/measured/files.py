"""Read the contributions in benchmarks/measured/runs: one folder per source, one file per run."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import NamedTuple

import msgspec

from shardwise.contribution.check import impossible
from shardwise.contribution.record import Contribution
from shardwise.spec.record import SpecError

RUNS = Path(__file__).resolve().parent / "runs"
# A record is a few kilobytes.
MOST_BYTES = 65_536
_SOURCE = re.compile(r"[a-z0-9][a-z0-9-]{0,39}")


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


class Checked(NamedTuple):
    """Valid contributions, and a sentence for each problem of the others."""

    entries: list[Entry]
    problems: list[str]


def check(folder: Path = RUNS) -> Checked:
    """Read and check every file: schema, names, impossible numbers, duplicates."""
    entries: list[Entry] = []
    problems: list[str] = []
    seen: dict[str, str] = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        where = path.relative_to(folder).as_posix()
        try:
            entry = _read(path, where)
        except SpecError as error:
            problems += error.problems
            continue
        wrong = [f"{where}: {problem}" for problem in impossible(entry.run)]
        if (first := seen.setdefault(entry.fingerprint, where)) != where:
            wrong.append(f"{where}: is a duplicate of {first}: the same run, the same measurement")
        problems += wrong
        entries += [] if wrong else [entry]
    return Checked(entries, problems)


def _read(path: Path, where: str) -> Entry:
    source, _, name = where.rpartition("/")
    if not _SOURCE.fullmatch(source) or not name.endswith(".json"):
        raise SpecError(f"{where}: must be runs/SOURCE/NAME.json, the source in [a-z0-9-]")
    if path.stat().st_size > MOST_BYTES:
        raise SpecError(f"{where}: is larger than {MOST_BYTES:,} bytes; a record is smaller")
    try:
        data = msgspec.json.decode(path.read_bytes())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SpecError(f"{where}: is not valid JSON: {error}") from None
    return Entry(path, source, Contribution.of_file(data, where))
