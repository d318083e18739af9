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
    """The few ranks that cause most of the waiting; None where many share it."""
    ranks = summary.ranks
    caused = caused_waiting(summary, joined, losses)
    total = sum(caused)
    if not total:
        return None
    order = sorted(range(len(ranks)), key=lambda i: -caused[i])
    # By chance one of two causes half of it: there it takes more to be blamed.
    needed = max(limits.straggler, 0.75 if len(ranks) == 2 else 0.0)
    few: list[int] = []
    for index in order[: max(1, len(ranks) // 4)]:
        few.append(index)
        if sum(caused[i] for i in few) >= needed * total:
            break
    else:
        return None
    late = joined.last_to_arrive()
    cause, reason = _why(ranks, few)
    return Straggler(
        ranks=[ranks[i].name for i in few],
        caused_ns=sum(caused[i] for i in few),
        cause=cause,
        reason=reason,
        last=int(late[few].sum()),
        collectives=joined.collectives,
    )


def _why(ranks: list[RankSummary], few: list[int]) -> tuple[Cause, str]:
    """What the worst of them does longer than the others, by the largest difference."""
    slow = ranks[few[0]]
    others = [rank for i, rank in enumerate(ranks) if i not in few]
    words: dict[Cause, str] = {
        "data": "loads data",
        "compute": "computes",
        "host": "has nothing queued" if not slow.on_cpu else "runs no operation",
    }
    times = {cause: (_spent(slow, cause), median(_spent(rank, cause) for rank in others))
             for cause in words}  # fmt: skip
    cause = max(times, key=lambda c: times[c][0] - times[c][1])
    mine, theirs = (value / 1e6 for value in times[cause])
    return (
        cause,
        f"{slow.name} {words[cause]} for {mine:,.1f} ms a step, the others for {theirs:,.1f} ms",
    )


def _spent(rank: RankSummary, cause: Cause) -> float:
    if cause == "data":
        return rank.per_step(rank.host.data_ns)
    if cause == "compute":
        return rank.per_step(rank.inside.compute_ns)
    idle = rank.host.idle
    return rank.per_step(idle.total_ns - idle.data_ns)
