"""Verdicts on waiting: a few stragglers (data loading, compute or host), or ranks in turn.

Whether a longer compute is that of experts with more tokens is decided in `experts`.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np

from shardwise.observe.diagnosis.stalls import Stalls
from shardwise.observe.diagnosis.verdict import Health, Verdict, duration, listed
from shardwise.observe.file.trace import Ints
from shardwise.observe.rank.summary import RankSummary
from shardwise.observe.ranks import JoinedCollectives
from shardwise.observe.rules import Thresholds
from shardwise.observe.summary import Summary
from shardwise.step.words import capital, percent

StragglerReason = Literal["data", "compute", "host", "experts"]

# Reasons that the times of a rank show.
REASONS: tuple[StragglerReason, ...] = ("data", "compute", "host")
# Share of a step by which a rank must exceed the others in every step; fewest steps needed.
STEADY_EXCESS, MIN_STEPS = 0.05, 2
# With fewer steps than this, a rank is a straggler only if it is late in each of them.
ENOUGH_STEPS = 10
# With two ranks, chance alone makes each cause half of the waiting: demand more.
_TWO_RANKS_SHARE = 0.75
# A rank is late too if it causes at least this share of the waiting that the worst rank causes.
AS_LATE = 0.5


@dataclass(frozen=True, kw_only=True)
class LateRank:
    """One straggler, why it is late, and how long it and the other ranks spend on that per step."""

    name: str
    # None if the trace does not record the rank: then `name` is the name of the file.
    number: int | None = None
    reason: StragglerReason
    # Nanoseconds per step of this rank, and the median of the ranks that are not late.
    spent_ns: float
    others_spent_ns: float
    last_to_arrive: int
    # For "experts": its tokens over the mean of its expert group.
    load: float | None = None


_FIXES: dict[StragglerReason, str] = {  # for "experts", see fix_of_load
    "data": "give the data loader{s} of {ranks} more workers, or check the disk",
    "compute": "check the {device}{s} of {ranks}: clocks, temperature, other jobs, longer "
    "sequences",
    "host": "check the host{s} of {ranks}: other processes, slow Python code, CPU clocks",
}


def fix_of_load(load: float, logged: float | None) -> str:
    """What to change where the busiest rank gets `load` times the mean number of tokens.

    `logged` is the load in the metrics of the run, of more steps than were traced.
    """
    routing = f"{load:.2f}" if logged is None else f"{logged:.2f}, the rank_load of its metrics,"
    return (
        'balance the routers: train.balance_loss = "global", or a larger coefficient of it; '
        f"job.routing = {routing} plans with this load"
    )


@dataclass(frozen=True, kw_only=True)
class Straggler(Verdict):
    """A few ranks for which the others wait, the rank that causes most waiting first.

    `reason`, `spent_ns` and `others_spent_ns` are those of the first rank; `late` has all ranks.
    """

    cause: Literal["straggler"] = "straggler"
    ranks: tuple[str, ...]
    late: tuple[LateRank, ...]
    reason: StragglerReason
    on_cpu: bool
    spent_ns: float
    others_spent_ns: float
    last_to_arrive: int
    collectives: int
    # Whether each straggler exceeds the others in every step, of at least two steps.
    every_step: bool
    # The load of ranks in the metrics of the run, if it was logged.
    logged_load: float | None = None

    @property
    def title(self) -> str:
        return f"Straggler{'' if len(self.late) == 1 else 's'}: {_names(self._in_order())}"

    def result(self, health: Health) -> str:
        delayed = "the one traced step" if health.steps else "the run"
        if health.steps > 1:
            delayed = "every step" if self.every_step else "the average step"
        verb = "delays" if len(self.ranks) == 1 else "delay"
        share = percent(self.share(health))
        return f"{self.title} {verb} {delayed} by {duration(self.saves_ns)} ({share})."

    def evidence(self, period: str) -> str:
        late = self._in_order()
        spent = ". ".join(self._spent(group, period) for group in self._by_reason())
        times = listed([f"{one.last_to_arrive:,}" for one in late])
        arrive = "It arrives" if len(late) == 1 else f"{capital(_names(late))} arrive"
        return f"{spent}. {arrive} last in {times} of {self.collectives:,} collectives with waiting"

    @property
    def fix(self) -> str:
        return "; ".join(map(self._fix_of, self._by_reason()))

    def _fix_of(self, late: list[LateRank]) -> str:
        """What to change for ranks that are late for one reason."""
        if late[0].reason == "experts":
            return fix_of_load(max(one.load or 1.0 for one in late), self.logged_load)
        return _FIXES[late[0].reason].format(
            ranks=_names(late),
            s="s" if len(late) > 1 else "",
            device="CPU" if self.on_cpu else "GPU",
        )

    def to_dict(self, health: Health) -> dict[str, Any]:
        """The verdict as `--json` prints it: its fields, `share` of the step, and `text`.

        `text` has result, evidence and fix. Late ranks have a name, but no number. `health` has
        what the share and the text refer to.
        """
        verdict = super().to_dict(health)
        for one in verdict["late"]:
            del one["number"]  # the name has it
        return verdict

    def _in_order(self) -> list[LateRank]:
        """The late ranks, by rank number."""
        return sorted(self.late, key=lambda one: (one.number or 0, len(one.name), one.name))

    def _by_reason(self) -> list[list[LateRank]]:
        """The late ranks, grouped by the reason why they are late."""
        late = self._in_order()
        reasons = dict.fromkeys(one.reason for one in late)
        return [[one for one in late if one.reason == reason] for reason in reasons]

    def _spent(self, late: list[LateRank], period: str) -> str:
        """Sentence on the time that ranks late for one reason spend on it, without a full stop."""
        one, reason = len(late) == 1, late[0].reason
        names = capital(_names(late))
        times = f"{listed([duration(rank.spent_ns) for rank in late])} {period}"
        if reason == "data":
            spent = f"{names} {'loads' if one else 'load'} data for {times}"
        elif reason == "compute":
            spent = f"{names} {'computes' if one else 'compute'} for {times}"
        elif reason == "experts":
            loads = listed([f"{rank.load:.2f}" for rank in late])
            spent = (
                f"Experts of {_names(late)} get {loads} times the mean number of tokens and "
                f"compute for {times}"
            )
        elif self.on_cpu:
            spent = f"{names} {'runs' if one else 'run'} no operation for {times}"
        else:
            gpus = f"The GPU{' of' if one else 's of'} {_names(late)}"
            spent = f"{gpus} {'is' if one else 'are'} idle for {times} (nothing queued by the host)"
        return f"{spent}, other ranks for {duration(late[0].others_spent_ns)} (median)"


def _names(late: list[LateRank]) -> str:
    """`rank 5`, `ranks 0 and 6`; names of files where a trace does not record its rank."""
    numbers = [str(one.number) for one in late if one.number is not None]
    if 1 < len(late) == len(numbers):
        return f"ranks {listed(numbers)}"
    return listed([one.name for one in late])


@dataclass(frozen=True, kw_only=True)
class RanksOutOfStep(Verdict):
    """Ranks wait for each other in turn; `latest_rank` arrives last most often."""

    cause: Literal["ranks_out_of_step"] = "ranks_out_of_step"
    latest_rank: str
    last_to_arrive: int
    collectives: int

    title = "Ranks wait for each other"
    fix = "give every rank the same number of tokens, and every process its own CPU cores"

    def evidence(self, period: str) -> str:
        """Sentence: how many collectives of the trace `latest_rank` joins last; no full stop."""
        return (
            f"No single rank is consistently late: {self.latest_rank} arrives last most often, in "
            f"{self.last_to_arrive:,} of {self.collectives:,} collectives with waiting"
        )


# ---- find the stragglers of a run ------------------------------------------------------------


def caused_waiting(
    summary: Summary, joined: JoinedCollectives, stalls: list[Stalls]
) -> list[float]:
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
    summary: Summary, joined: JoinedCollectives, stalls: list[Stalls], limits: Thresholds
) -> Straggler | None:
    """The verdict on the few ranks for which the others wait; None if there are none.

    Either a few ranks cause most of the waiting. Or, where noise hides that, ranks cause more than
    others and spend more time on the same thing in every step.
    """
    caused = caused_waiting(summary, joined, stalls)
    if not sum(caused):
        return None
    return _by_waiting(summary, joined, caused, limits) or _by_steady_excess(
        summary, joined, caused
    )


def _by_waiting(
    summary: Summary, joined: JoinedCollectives, caused: list[float], limits: Thresholds
) -> Straggler | None:
    """The verdict on the ranks that cause most of the waiting; None if they are not few.

    `caused` has the nanoseconds per step of waiting that each rank causes.
    """
    ranks, order = summary.ranks, _worst_first(caused)
    needed = max(limits.straggler, _TWO_RANKS_SHARE if len(ranks) == 2 else 0.0)
    few = [index for index in order if caused[index] >= AS_LATE * caused[order[0]]]
    by_few = sum(caused[index] for index in few[: max(1, len(ranks) // 4)])
    if by_few < needed * sum(caused) or len(few) == len(ranks):
        return None
    others = [rank for i, rank in enumerate(ranks) if i not in few]
    reasons = {i: max(REASONS, key=lambda c: _excess_ns(ranks[i], others, c)) for i in few}
    late = [_late_rank(summary, joined, i, others, reasons[i]) for i in few]
    found = _straggler(summary, joined, few, sum(caused[i] for i in few), late)
    # In a few noisy steps it may be chance which rank is late.
    is_chance = not found.every_step and 1 < len(ranks[few[0]].steps) < ENOUGH_STEPS
    return None if is_chance else found


def _by_steady_excess(
    summary: Summary, joined: JoinedCollectives, caused: list[float]
) -> Straggler | None:
    """The verdict on ranks that cause more waiting than average and are slower in every step.

    None if the rank that causes most waiting is not among them.
    """
    ranks, order = summary.ranks, _worst_first(caused)
    average = sum(caused) / len(ranks)
    reasons: dict[int, StragglerReason] = {}
    for index in order:
        if caused[index] < average:
            break
        rank, others = ranks[index], [one for i, one in enumerate(ranks) if i != index]
        excess = {c: _smallest_excess(rank, others, c) for c in REASONS}
        reason = max(REASONS, key=lambda c: excess[c])
        if excess[reason] >= STEADY_EXCESS * rank.per_step(rank.profiled.window_ns):
            reasons[index] = reason
    if order[0] not in reasons:
        return None
    few = [*reasons] if len(reasons) < len(ranks) else order[:1]
    others = [rank for i, rank in enumerate(ranks) if i not in few]
    saves = sum(min(caused[i], _excess_ns(ranks[i], others, reasons[i])) for i in few)
    late = [_late_rank(summary, joined, i, others, reasons[i]) for i in few]
    return _straggler(summary, joined, few, saves, late)


def _worst_first(caused: list[float]) -> list[int]:
    """Indices of ranks, the rank that causes most waiting first."""
    return sorted(range(len(caused)), key=lambda index: -caused[index])


def _late_rank(
    summary: Summary,
    joined: JoinedCollectives,
    index: int,
    others: list[RankSummary],
    reason: StragglerReason,
) -> LateRank:
    """The late rank at `index`; times are means over steps, as in the table of ranks."""
    rank = summary.ranks[index]
    return LateRank(
        name=rank.name,
        number=rank.rank,
        reason=reason,
        spent_ns=_average(rank, reason),
        others_spent_ns=median(_average(one, reason) for one in others),
        last_to_arrive=int(joined.last_to_arrive()[index]),
    )


def _average(rank: RankSummary, reason: StragglerReason) -> float:
    """Nanoseconds per step that a rank spends on `reason`, as in the table of ranks.

    For "host" this is idle time, which includes loading data.
    """
    if reason == "data":
        return rank.per_step(rank.host.data_ns)
    profiled = rank.profiled
    return rank.per_step(profiled.compute_ns if reason == "compute" else profiled.idle_ns)


def _straggler(
    summary: Summary,
    joined: JoinedCollectives,
    few: list[int],
    saves_ns: float,
    late: list[LateRank],
) -> Straggler:
    """The verdict on the ranks with indices `few`; `late` describes them in the same order."""
    ranks = summary.ranks
    others = [one for i, one in enumerate(ranks) if i not in few]
    return Straggler(
        saves_ns=saves_ns,
        ranks=tuple(one.name for one in late),
        late=tuple(late),
        reason=late[0].reason,
        on_cpu=ranks[few[0]].on_cpu,
        spent_ns=late[0].spent_ns,
        others_spent_ns=late[0].others_spent_ns,
        last_to_arrive=sum(one.last_to_arrive for one in late),
        collectives=int(joined.last_to_arrive().sum()),
        every_step=all(
            _smallest_excess(ranks[index], others, one.reason) > 0
            for index, one in zip(few, late, strict=True)
        ),
    )


def _median_spent(
    rank: RankSummary, others: list[RankSummary], reason: StragglerReason
) -> tuple[float, float]:
    """Median nanoseconds per step that a rank, and that the other ranks, spend on `reason`."""
    return median(_time_spent(rank, reason)), median(
        median(_time_spent(one, reason)) for one in others
    )


def _excess_ns(rank: RankSummary, others: list[RankSummary], reason: StragglerReason) -> float:
    """Nanoseconds per step that a rank spends on `reason` beyond the median of the others."""
    mine, theirs = _median_spent(rank, others, reason)
    return mine - theirs


def _smallest_excess(
    rank: RankSummary, others: list[RankSummary], reason: StragglerReason
) -> float:
    """Nanoseconds by which a rank exceeds the others in the step with the smallest excess.

    0 with fewer than two steps, or if other ranks have fewer steps.
    """
    mine = _time_spent(rank, reason)
    theirs = list(zip(*(_time_spent(one, reason) for one in others), strict=False))
    if len(mine) < MIN_STEPS or len(theirs) < len(mine):
        return 0.0
    excess: list[float] = [own - median(step) for own, step in zip(mine, theirs, strict=False)]
    return min(excess)


def _time_spent(rank: RankSummary, reason: StragglerReason) -> list[float]:
    """Nanoseconds that a rank spends on `reason` in each step.

    One value for the full trace where no step is marked. For "host" this is idle time without
    loading data.
    """
    steps = rank.steps or [rank.profiled]
    data = rank.host.data_by_step or [rank.host.data_ns]
    if reason == "data":
        return [float(value) for value in data]
    if reason == "compute":
        return [float(step.compute_ns) for step in steps]
    pairs = zip(steps, data, strict=True)
    return [float(max(0, step.idle_ns - loading)) for step, loading in pairs]
