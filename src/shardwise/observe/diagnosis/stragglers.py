"""Stragglers: ranks for which the others wait, and why (data loading, compute or host)."""

from __future__ import annotations

from statistics import median

import numpy as np

from shardwise.observe.diagnosis.stalls import Stalls
from shardwise.observe.diagnosis.verdict import Straggler, StragglerReason
from shardwise.observe.file.trace import Ints
from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.ranks import Joined
from shardwise.observe.rules import Thresholds
from shardwise.observe.summary import Summary

REASONS: tuple[StragglerReason, ...] = ("data", "compute", "host")
# By which share of a step a rank must exceed the others, in every one of at least so many steps.
STEADY_EXCESS, MIN_STEPS = 0.05, 2
# With two ranks, chance alone makes each cause half of the waiting: demand more.
_TWO_RANKS_SHARE = 0.75


def caused_waiting(summary: Summary, joined: Joined, stalls: list[Stalls]) -> list[float]:
    """Exposed waiting that each rank causes on the average other rank, in nanoseconds per step."""
    ranks = summary.ranks
    exposed = np.zeros(len(joined.call), dtype=np.float64)
    for mine, rank, stall in zip(joined.by_rank(), ranks, stalls, strict=True):
        exposed[mine] = stall.waiting_ns[joined.call[mine]] / max(1, len(rank.steps))
    latest: Ints = joined.last_rank[joined.collective]
    others = max(1, len(ranks) - 1)
    caused = np.bincount(latest, weights=exposed, minlength=len(ranks)) / others
    return [float(value) for value in caused]


def straggler_of(
    summary: Summary, joined: Joined, stalls: list[Stalls], limits: Thresholds
) -> Straggler | None:
    """The few ranks for which the others wait; None if no rank is consistently late.

    Either a few ranks cause most of the waiting. Or, where noise hides that, one rank causes more
    than any other and spends more time on the same thing in every step.
    """
    ranks = summary.ranks
    caused = caused_waiting(summary, joined, stalls)
    total = sum(caused)
    if not total:
        return None
    order = sorted(range(len(ranks)), key=lambda i: -caused[i])
    needed = max(limits.straggler, _TWO_RANKS_SHARE if len(ranks) == 2 else 0.0)
    few: list[int] = []
    for index in order[: max(1, len(ranks) // 4)]:
        few.append(index)
        if sum(caused[i] for i in few) >= needed * total:
            others = [rank for i, rank in enumerate(ranks) if i not in few]
            reason = max(REASONS, key=lambda c: _excess(ranks[few[0]], others, c))
            spent = _median_spent(ranks[few[0]], others, reason)
            return _straggler(summary, joined, few, sum(caused[i] for i in few), reason, spent)
    worst = order[0]
    others = [rank for i, rank in enumerate(ranks) if i != worst]
    smallest_excess = {c: _smallest_excess(ranks[worst], others, c) for c in REASONS}
    reason = max(REASONS, key=lambda c: smallest_excess[c])
    step = ranks[worst].per_step(ranks[worst].profiled.window_ns)
    if smallest_excess[reason] < STEADY_EXCESS * step:
        return None
    spent = _median_spent(ranks[worst], others, reason)
    saves = min(caused[worst], spent[0] - spent[1])
    return _straggler(summary, joined, [worst], saves, reason, spent)


def _straggler(
    summary: Summary,
    joined: Joined,
    few: list[int],
    saves_ns: float,
    reason: StragglerReason,
    spent: tuple[float, float],
) -> Straggler:
    late = joined.last_to_arrive()
    return Straggler(
        saves_ns=saves_ns,
        ranks=tuple(summary.ranks[i].name for i in few),
        reason=reason,
        on_cpu=summary.ranks[few[0]].on_cpu,
        spent_ns=spent[0],
        others_spent_ns=spent[1],
        last_to_arrive=int(late[few].sum()),
        collectives=int(late.sum()),
    )


def _median_spent(
    rank: RankSummary, others: list[RankSummary], reason: StragglerReason
) -> tuple[float, float]:
    """Median over steps of the time a rank spends on something, and of the others' time."""
    return median(_spent(rank, reason)), median(median(_spent(one, reason)) for one in others)


def _excess(rank: RankSummary, others: list[RankSummary], reason: StragglerReason) -> float:
    mine, theirs = _median_spent(rank, others, reason)
    return mine - theirs


def _smallest_excess(
    rank: RankSummary, others: list[RankSummary], reason: StragglerReason
) -> float:
    """Time by which a rank exceeds the others in the step with the smallest excess."""
    mine = _spent(rank, reason)
    theirs = list(zip(*(_spent(one, reason) for one in others), strict=False))
    if len(mine) < MIN_STEPS or len(theirs) < len(mine):
        return 0.0
    excess: list[float] = [own - median(step) for own, step in zip(mine, theirs, strict=False)]
    return min(excess)


def _spent(rank: RankSummary, reason: StragglerReason) -> list[float]:
    """Nanoseconds per step, or of the full trace where no step is marked."""
    steps = rank.steps or [rank.profiled]
    data = rank.host.data_by_step or [rank.host.data_ns]
    if reason == "data":
        return [float(value) for value in data]
    if reason == "compute":
        return [float(step.compute_ns) for step in steps]
    pairs = zip(steps, data, strict=True)
    return [float(max(0, step.idle_ns - loading)) for step, loading in pairs]
