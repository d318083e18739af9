"""The table of ranks of a trace, for screens and pages: compute, communication and idle time."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.observe.diagnosis.device import IdleDevice
from shardwise.observe.diagnosis.experts import ExpertImbalance
from shardwise.observe.diagnosis.stragglers import Straggler
from shardwise.observe.diagnosis.verdict import Verdict
from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.rules import Thresholds
from shardwise.observe.summary import Summary
from shardwise.report.table import Cell, Column, Table
from shardwise.step.words import milliseconds, percent

EXPOSED = "Exposed: no compute at the same time. Overlap: communication hidden by compute."
_PARTS = {
    "compute": "compute",
    "exposed_comm": "exposed comm",
    "exposed_copies": "exposed copies",
    "idle": "idle",
}


def ranks_to_show(summary: Summary, verdicts: Sequence[Verdict], most: int) -> list[RankSummary]:
    """At most `most` ranks, in rank order: ranks in verdicts, then those that compute least."""
    late = [one for one in verdicts if isinstance(one, Straggler | ExpertImbalance)]
    named = {name for one in late for name in one.ranks}
    named |= {one.rank for one in verdicts if isinstance(one, IdleDevice)}

    def first(rank: RankSummary) -> tuple[bool, float]:
        return rank.name not in named, rank.profiled.compute_ns / (rank.profiled.window_ns or 1)

    return sorted(sorted(summary.ranks, key=first)[:most], key=summary.ranks.index)


def ranks_table(
    summary: Summary, ranks: Sequence[RankSummary], thresholds: Thresholds | None = None
) -> Table:
    """Table of milliseconds per step by rank with shares, and how often each arrives last.

    `thresholds` adds a last row with the targets that the rules file sets.
    """
    steps = any(rank.steps for rank in summary.ranks)
    table = Table(
        (
            Column("rank", "rank"),
            Column("step_ns", "step" if steps else "trace", _milliseconds),
            *(Column(key, title) for key, title in _PARTS.items()),
            Column("overlap", "overlap", percent),
            Column("last_to_arrive", "arrives last", on_screen=False),
        )
    )
    late = summary.joined.last_to_arrive() if summary.joined is not None else None
    for rank in ranks:
        parts = rank.profiled
        table.add(
            Cell(rank.rank, "-" if rank.rank is None else str(rank.rank)),
            rank.per_step(parts.window_ns),
            *(_part(rank, part) for part in parts[: len(_PARTS)]),
            Cell(parts.overlap, "-" if parts.overlap is None else None),
            int(late[summary.ranks.index(rank)]) if late is not None else None,
        )
    if thresholds is None:
        return table
    if thresholds.idle_ms is not None or thresholds.overlap is not None:
        idle = f"< {thresholds.idle_ms:,.0f}" if thresholds.idle_ms is not None else ""
        overlap = f"> {percent(thresholds.overlap)}" if thresholds.overlap is not None else ""
        table.add(
            *(Cell(None, text, "dim") for text in ("target", "", "", "", "", idle, overlap, ""))
        )
    return table


def _part(rank: RankSummary, nanoseconds: int) -> Cell:
    """Cell with nanoseconds per step, shown as milliseconds and share of the profiled time."""
    share = nanoseconds / (rank.profiled.window_ns or 1)
    spent = rank.per_step(nanoseconds)
    return Cell(spent, f"{_milliseconds(spent)} ({percent(share)})")


def _milliseconds(nanoseconds: float) -> str:
    """Nanoseconds as milliseconds, without a unit."""
    return milliseconds(nanoseconds, ".1f", 99.95)
