"""The verdict on uneven routing: ranks wait for the one whose experts got the most tokens.

The rank that arrives last where outputs return from experts is late because of tokens only as far
as three things agree: the others wait, it computed longer than they did, and it got more tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.observe.diagnosis.stalls import Stalls
from shardwise.observe.diagnosis.stragglers import AS_LATE, LateRank, Straggler, fix_of_load
from shardwise.observe.diagnosis.verdict import Verdict, duration, listed
from shardwise.observe.file.trace import Ints
from shardwise.observe.ranks import JoinedCollectives
from shardwise.observe.summary import Summary

# Share of a straggler's longer compute that tokens must explain to be called its reason.
EXPLAINED = 0.5

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class BusyRank:
    """A rank whose experts got more tokens than those of others.

    `load` is its tokens over the mean of its expert group; its experts compute for `compute_ns`
    per step, those of other ranks for `others_compute_ns` (median).
    """

    name: str
    load: float
    compute_ns: float
    others_compute_ns: float


@dataclass(frozen=True, kw_only=True)
class ExpertImbalance(Verdict):
    """Ranks wait for others whose experts got more tokens, the rank waited for most first."""

    cause: Literal["expert_imbalance"] = "expert_imbalance"
    ranks: tuple[str, ...]
    busy: tuple[BusyRank, ...]
    # Tokens of the busiest rank of each pass through experts over the mean, mean over passes.
    load: float
    # The load of ranks in the metrics of the run, if it was logged.
    logged_load: float | None = None

    @property
    def title(self) -> str:
        return f"Uneven experts on {listed(self.ranks)}"

    def evidence(self, period: str) -> str:
        loads = listed([f"{one.load:.2f}" for one in self.busy])
        times = listed([duration(one.compute_ns) for one in self.busy])
        others = duration(self.busy[0].others_compute_ns)
        return (
            f"The busiest rank of a layer gets {self.load:.2f} times the mean number of tokens. "
            f"Experts of {listed(self.ranks)} get {loads} times the mean over all layers and "
            f"compute for {times} {period}, those of other ranks for {others} (median)"
        )

    @property
    def fix(self) -> str:
        return fix_of_load(self.load, self.logged_load)


class _Loads(NamedTuple):
    """Passes through experts that all given ranks of a group have; figures are per step."""

    # By rank: tokens over the mean of its group (nan without experts), and nanoseconds of compute.
    load: Floats
    compute_ns: Floats
    # By rank: nanoseconds of waiting, mean over ranks, that its additional tokens cause.
    caused_ns: Floats
    busiest_load: float


class _Passes(NamedTuple):
    """Of each joined call: the pass through experts that it ends, its exposed waiting, its step."""

    received: Ints
    compute_ns: Ints
    waiting_ns: Ints
    step: Ints


def expert_imbalance_of(
    summary: Summary, joined: JoinedCollectives, stalls: list[Stalls]
) -> ExpertImbalance | None:
    """The verdict on uneven routing; None where no rank waits for the experts of another."""
    found = _loads_of(summary, joined, stalls)
    if found is None or not found.caused_ns.any():
        return None
    order = np.argsort(-found.caused_ns, kind="stable").tolist()
    few = [i for i in order if found.caused_ns[i] >= AS_LATE * found.caused_ns[order[0]]]
    few = few if len(few) < len(order) else few[:1]
    others = [i for i in order if i not in few and not np.isnan(found.load[i])]
    others_compute = median(found.compute_ns[others].tolist()) if others else 0.0
    busy = [
        BusyRank(
            name=summary.ranks[i].name,
            load=float(found.load[i]),
            compute_ns=float(found.compute_ns[i]),
            others_compute_ns=others_compute,
        )
        for i in few
    ]
    return ExpertImbalance(
        saves_ns=float(found.caused_ns.sum()),
        ranks=tuple(one.name for one in busy),
        busy=tuple(busy),
        load=found.busiest_load,
        logged_load=summary.rank_load,
    )


def with_experts(straggler: Straggler, imbalance: ExpertImbalance) -> Straggler:
    """`straggler` with the reason "experts" for ranks whose longer compute tokens explain."""
    busy = {one.name: one for one in imbalance.busy}
    late = tuple(
        _late_by_tokens(one, busy[one.name]) if one.name in busy else one for one in straggler.late
    )
    first = late[0]
    return replace(
        straggler,
        late=late,
        reason=first.reason,
        spent_ns=first.spent_ns,
        others_spent_ns=first.others_spent_ns,
        logged_load=imbalance.logged_load,
    )


def _late_by_tokens(late: LateRank, busy: BusyRank) -> LateRank:
    """The late rank with the reason "experts" if its tokens explain most of its longer compute."""
    explained = min(busy.compute_ns - busy.others_compute_ns, busy.compute_ns * (1 - 1 / busy.load))
    excess = late.spent_ns - late.others_spent_ns
    if late.reason != "compute" or busy.load <= 1 or explained < EXPLAINED * excess:
        return late
    return replace(
        late,
        reason="experts",
        spent_ns=busy.compute_ns,
        others_spent_ns=busy.others_compute_ns,
        load=busy.load,
    )


def _loads_of(summary: Summary, joined: JoinedCollectives, stalls: list[Stalls]) -> _Loads | None:
    """Tokens, compute and the waiting they cause, by rank; None without passes through experts."""
    found = _pass_of_calls(summary, joined, stalls)
    # A collective counts if every given rank of its group passes tokens through experts before it.
    first = np.flatnonzero(np.diff(joined.collective, prepend=-1))
    size = np.diff(np.append(first, len(joined.collective)))
    kept = np.repeat(np.minimum.reduceat(found.received, first) >= 0, size)
    if not kept.any():
        return None
    mean = np.repeat(np.add.reduceat(found.received, first) / size, size)
    most = np.repeat(np.maximum.reduceat(found.received, first), size)
    ranks = len(summary.ranks)
    steps = max(1, *(len(rank.steps) for rank in summary.ranks))

    def of_rank(values: Floats | Ints) -> Floats:
        sums = np.bincount(joined.rank[kept], weights=values[kept], minlength=ranks)
        return sums.astype(np.float64)

    with np.errstate(invalid="ignore"):
        load = of_rank(found.received) / of_rank(mean)
    by_step = np.zeros((steps, ranks))
    late = joined.last_rank[joined.collective[kept]]
    np.add.at(by_step, (found.step[kept], late), _explained(joined, found)[kept] / ranks)
    # A process that is stopped for a moment in one step is no sign of its tokens.
    typical = median(by_step.sum(1).tolist()) / max(float(by_step.sum()), 1.0)
    return _Loads(
        load=load,
        compute_ns=of_rank(found.compute_ns) / steps,
        caused_ns=by_step.sum(0) * typical,
        busiest_load=float(most[kept].sum() / max(float(mean[kept].sum()), 1.0)),
    )


def _explained(joined: JoinedCollectives, found: _Passes) -> Floats:
    """Nanoseconds that each call waits because the last rank's experts got more tokens.

    At most the time of those tokens at the last rank's pace, and what it computed longer.
    """
    last = np.flatnonzero(joined.rank == joined.last_rank[joined.collective])[joined.collective]
    longer = found.compute_ns[last] - found.compute_ns
    more = 1 - found.received / np.maximum(found.received[last], 1)
    explained = np.minimum(more * found.compute_ns[last], np.minimum(longer, found.waiting_ns))
    positive: Floats = np.maximum(explained, 0.0)
    return positive


def _pass_of_calls(summary: Summary, joined: JoinedCollectives, stalls: list[Stalls]) -> _Passes:
    """The pass through experts that each joined call ends; -1 where it ends none."""
    count = len(joined.call)
    received, compute, waiting = (np.full(count, -1, dtype=np.int64) for _ in range(3))
    step = np.zeros(count, dtype=np.int64)
    for mine, rank, stall in zip(joined.by_rank(), summary.ranks, stalls, strict=True):
        passes, calls = rank.expert_passes, joined.call[mine]
        number = np.full(len(rank.calls), -1, dtype=np.int64)
        number[passes.call] = np.arange(len(passes.call))
        begin, end = rank.span
        start = joined.start_ns[mine]
        known = (number[calls] >= 0) & (start >= begin) & (start < end)
        rows, index = mine[known], number[calls[known]]
        received[rows], compute[rows] = passes.received[index], passes.compute_ns[index]
        waiting[rows] = stall.waiting_ns[calls[known]]
        later_steps = [window for window, _ in rank.windows[1:]]
        step[rows] = np.searchsorted(later_steps, start[known], side="right")
    return _Passes(received, compute, waiting, step)
