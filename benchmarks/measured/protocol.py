"""The protocol by which contributions are judged and fitted, as protocol.toml states it.

Rows of published tables that are held out stay held out. Every source of contributions is held out
first. A release publishes its error; only a later release may fit it.
"""

from __future__ import annotations

import csv
import hashlib
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from pydantic import Field

from benchmarks.measured.files import Entry
from benchmarks.validation import FOLDER
from shardwise.spec.record import Record
from shardwise.spec.version import __version__

FILE = Path(__file__).with_name("protocol.toml")


class HeldOut(Record):
    """Held-out rows of published tables: how many, and the digest of their sorted ids."""

    rows: int
    sha256: str


class Judged(Record):
    """A source that may be fitted: the release that published its held-out error, and that error.

    `sha256` is the digest of its files: a source that is fitted takes no more runs.
    """

    source: str
    judged_in: str
    runs: int
    median_error: float
    sha256: str


class Protocol(Record):
    """Who is held out, who is fitted."""

    version: Literal[1]
    rules: tuple[str, ...]
    # Fewest fitted runs of a device that get coefficients of their own.
    least_runs: int = Field(ge=2)
    published_time: HeldOut
    published_memory: HeldOut
    fitted: tuple[Judged, ...] = ()

    def split(self, source: str) -> Literal["fit", "heldout"]:
        return "fit" if any(one.source == source for one in self.fitted) else "heldout"


def read_protocol(path: Path = FILE) -> Protocol:
    return Protocol.read(tomllib.loads(path.read_text(encoding="utf-8")), where=path.name)


def violations(protocol: Protocol, entries: Sequence[Entry], now: str = __version__) -> list[str]:
    """A sentence for each source that is fitted against the rules."""
    problems = []
    for one in protocol.fitted:
        own = [entry for entry in entries if entry.source == one.source]
        if _release(one.judged_in) >= _release(now):
            problems.append(
                f"{one.source}: was judged in {one.judged_in}; held out until a release after that"
            )
        if len(own) != one.runs or digest(entry.fingerprint for entry in own) != one.sha256:
            problems.append(
                f"{one.source}: its runs are not those that were judged; new runs are a new source"
            )
    return problems


def published_violations(protocol: Protocol) -> list[str]:
    """A sentence for each split of the published tables that is not the frozen one."""
    with (FOLDER / "measured_runs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    problems = []
    for split, frozen in (
        ("split", protocol.published_time),
        ("mem_split", protocol.published_memory),
    ):
        ids = [row["id"] for row in rows if row[split] == "heldout"]
        if (len(ids), digest(ids)) != (frozen.rows, frozen.sha256):
            problems.append(f"measured_runs.csv: {split} has other held-out rows than were frozen")
    return problems


def digest(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(names)).encode()).hexdigest()


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
