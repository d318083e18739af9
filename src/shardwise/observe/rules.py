"""The TOML file of `--rules`: kernel name patterns, and thresholds of verdicts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from shardwise.spec.quantity import Bytes
from shardwise.spec.read_file import read_toml
from shardwise.spec.record import Record

Share = Annotated[float, Field(ge=0, le=1)]


def _pattern(text: str) -> str:
    """Return `text` unchanged; raise ValueError if it is not a regular expression."""
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is not a valid regular expression: {error}") from None
    return text


Patterns = tuple[Annotated[str, AfterValidator(_pattern)], ...]


class Thresholds(Record):
    """Thresholds of verdicts; times and shares are per optimizer step."""

    # A run with a higher compute share has nothing to gain that is worth a verdict.
    compute: Share = 0.97
    # Your own targets, shown below the ranks: hidden share of communication, and idle time.
    overlap: Share | None = None
    idle_ms: Annotated[float, Field(ge=0)] | None = None
    # Causes that cost less than this share of a step are not reported.
    least: Share = 0.01
    small_message: Bytes = 2**20
    # Expected shares of the peak bandwidth and peak FLOP/s of the cluster.
    link: Share = 0.5
    matmul: Share = 0.5
    # Share of all waiting that a few ranks must cause to be called stragglers.
    straggler: Share = 0.6


class Rules(Record):
    """Regular expressions for kernel names, which override all other evidence, and thresholds."""

    compute: Patterns = ()
    communication: Patterns = ()
    copy_: Annotated[Patterns, Field(alias="copy")] = ()
    thresholds: Thresholds = Field(default_factory=Thresholds)


def read_rules(path: Path) -> Rules:
    """Read a TOML file of rules; raise SpecError if it is invalid."""
    return Rules.read(read_toml(path, "rules"), "rules")
