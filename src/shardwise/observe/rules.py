"""What a user knows better, and what counts as healthy: the TOML file behind `--rules`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, Field

from shardwise.spec.lookup import read_toml
from shardwise.spec.quantity import Bytes
from shardwise.spec.record import Record

Share = Annotated[float, Field(ge=0, le=1)]


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise ValueError(f"{text!r} is no regular expression: {error}") from None
    return text


Patterns = tuple[Annotated[str, AfterValidator(_pattern)], ...]


class Thresholds(Record):
    """Everything is of one optimizer step."""

    # A run that computes for more than this share of its time is healthy.
    compute: Share = 0.97
    # Less communication hidden than this, or more idle time, is marked.
    overlap: Share = 0.95
    idle_ms: Annotated[float, Field(ge=0)] = 100.0
    # A loss below this share of a step is not worth a sentence.
    least: Share = 0.01
    small_message: Bytes = 2**20
    # Shares of what the named cluster's links and devices can do.
    link: Share = 0.5
    matmul: Share = 0.5
    # The share of all waiting that a few ranks must cause to be called stragglers.
    straggler: Share = 0.6


class Rules(Record):
    """Names of kernels, as regular expressions that come before all evidence, and thresholds."""

    compute: Patterns = ()
    communication: Patterns = ()
    copy_: Annotated[Patterns, Field(alias="copy")] = ()
    thresholds: Thresholds = Field(default_factory=Thresholds)


def read_rules(path: Path) -> Rules:
    return Rules.read(read_toml(path, "rules"), "rules")
