"""One cause of lost time, and the words all causes share."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.observe.rank.summary import RankSummary

_MILLISECOND = 1e6


class Verdict(NamedTuple):
    """One cause of lost time."""

    cause: str
    saves_ns: float
    statement: str
    evidence: str
    change: str


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def ms(nanoseconds: float) -> str:
    value = nanoseconds / _MILLISECOND
    return f"{value:,.0f} ms" if value >= 99.95 else f"{value:.1f} ms" if value >= 0.95 else (
        f"{value:.3f} ms")  # fmt: skip


def sentence(text: str) -> str:
    """With a capital first letter; the others stay as they are."""
    return text[:1].upper() + text[1:]


def lost(nanoseconds: float, ranks: list[RankSummary]) -> str:
    steps = any(rank.steps for rank in ranks)
    return f"{ms(nanoseconds)} of {'each step' if steps else 'the trace'}"
