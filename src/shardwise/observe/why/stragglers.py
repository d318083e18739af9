"""Who keeps the others waiting, and why: its data, its kernels or its host."""

from __future__ import annotations

from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from shardwise.observe.file.trace import Ints
from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.ranks import Joined
from shardwise.observe.rules import Thresholds
from shardwise.observe.summary import Summary
from shardwise.observe.why.losses import Losses

Cause = Literal["data", "compute", "host"]
CAUSES: tuple[Cause, ...] = ("data", "compute", "host")
# The share of a step by which a rank must exceed the others in every one of so many steps.
STEADY, LEAST_STEPS = 0.05, 2


class Straggler(NamedTuple):
    """Ranks for which the others wait; times are nanoseconds of a step."""

    ranks: list[str]
    # What the average other rank would save.
    caused_ns: float
    cause: Cause
    reason: str
    last: int
    collectives: int


def caused_waiting(summary: Summary, joined: Joined, losses: list[Losses]) -> list[float]:
    """Exposed waiting that each rank causes to the average other one, in nanoseconds of a step."""
    ranks = summary.ranks
    exposed = np.zeros(len(joined.call), dtype=np.float64)
    for mine, rank, loss in zip(joined.by_rank(), ranks, losses, strict=True):
        exposed[mine] = loss.waiting_ns[joined.call[mine]] / max(1, len(rank.steps))
    blamed: Ints = joined.last_rank[joined.collective]
    others = max(1, len(ranks) - 1)
    caused = np.bincount(blamed, weights=exposed, minlength=len(ranks)) / others
    return [float(value) for value in caused]


def straggler_of(
    summary: Summary, joined: Joined, losses: list[Losses], limits: Thresholds
) -> Straggler | None:
    """The few ranks for which the others wait; None where ranks take turns.

    They cause most of the waiting. Or, where noise drowns that, one causes more than any other and
    in every step spends more than the others on the same thing.
    """
    ranks = summary.ranks
    caused = caused_waiting(summary, joined, losses)
    total = sum(caused)
    if not total:
        return None
    late = joined.last_to_arrive()

    def told(few: list[int], saves: float, cause: Cause, spent: tuple[float, float]) -> Straggler:
        mine, theirs = (value / 1e6 for value in spent)
        slow = ranks[few[0]]
        words = {
            "data": "loads data",
            "compute": "computes",
            "host": "runs no operation" if slow.on_cpu else "has nothing queued",
        }
        return Straggler(
            ranks=[ranks[i].name for i in few],
            caused_ns=saves,
            cause=cause,
            reason=f"{slow.name} {words[cause]} for {mine:,.1f} ms a step, the others for "
            f"{theirs:,.1f} ms",
            last=int(late[few].sum()),
            collectives=joined.collectives,
        )

    order = sorted(range(len(ranks)), key=lambda i: -caused[i])
    # By chance one of two causes half of it: there it takes more to be blamed.
    needed = max(limits.straggler, 0.75 if len(ranks) == 2 else 0.0)
    few: list[int] = []
    for index in order[: max(1, len(ranks) // 4)]:
        few.append(index)
        if sum(caused[i] for i in few) >= needed * total:
            others = [rank for i, rank in enumerate(ranks) if i not in few]
            cause = max(CAUSES, key=lambda c: _excess(ranks[few[0]], others, c))
            spent = _middle(ranks[few[0]], others, cause)
            return told(few, sum(caused[i] for i in few), cause, spent)
    worst = order[0]
    others = [rank for i, rank in enumerate(ranks) if i != worst]
    always = {c: _always_more(ranks[worst], others, c) for c in CAUSES}
    cause = max(CAUSES, key=lambda c: always[c])
    step = ranks[worst].per_step(ranks[worst].inside.window_ns)
    if always[cause] < STEADY * step:
        return None
    spent = _middle(ranks[worst], others, cause)
    return told([worst], min(caused[worst], spent[0] - spent[1]), cause, spent)


def _middle(rank: RankSummary, others: list[RankSummary], cause: Cause) -> tuple[float, float]:
    """What it spends in the middle step, and what the others do."""
    return median(_spent(rank, cause)), median(median(_spent(one, cause)) for one in others)


def _excess(rank: RankSummary, others: list[RankSummary], cause: Cause) -> float:
    mine, theirs = _middle(rank, others, cause)
    return mine - theirs


def _always_more(rank: RankSummary, others: list[RankSummary], cause: Cause) -> float:
    """By how much it exceeds the others in the step in which it does so least."""
    mine = _spent(rank, cause)
    theirs = list(zip(*(_spent(one, cause) for one in others), strict=False))
    if len(mine) < LEAST_STEPS or len(theirs) < len(mine):
        return 0.0
    excess: list[float] = [own - median(step) for own, step in zip(mine, theirs, strict=False)]
    return min(excess)


def _spent(rank: RankSummary, cause: Cause) -> list[float]:
    """Nanoseconds of every step, or of the whole trace where no step is marked."""
    steps = rank.steps or [rank.inside]
    data = rank.host.data_by_step or [rank.host.data_ns]
    if cause == "data":
        return [float(value) for value in data]
    if cause == "compute":
        return [float(step.compute_ns) for step in steps]
    pairs = zip(steps, data, strict=True)
    return [float(max(0, step.idle_ns - loading)) for step, loading in pairs]
