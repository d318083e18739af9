"""Verdicts: causes of lost time as data. `report/verdicts.py` puts them into words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.spec.dtype import DType

IdleCause = Literal["data_loading", "allocator", "rate_limiter", "synchronisation", "launch_bound",
                    "unexplained_idle"]  # fmt: skip
StragglerReason = Literal["data", "compute", "host"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A cause of lost time, by a stable key.

    `saves_ns` is what fixing it saves per step, on the average rank; per trace where no step is
    marked. All times, calls and gathers of verdicts are per step in this sense. `last_to_arrive`
    counts among the `collectives` of the full trace in which a rank waited.
    """

    cause: str
    saves_ns: float


@dataclass(frozen=True, kw_only=True)
class LateRank:
    """What one straggler spends more time on than the others do."""

    name: str
    reason: StragglerReason
    # Of this rank, and the median of the ranks that are not late.
    spent_ns: float
    others_spent_ns: float
    last_to_arrive: int


@dataclass(frozen=True, kw_only=True)
class Straggler(Verdict):
    """A few ranks for which the others wait, those that cause most of it first.

    `reason` and the times are those of the first; `late` has those of each.
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
    # Whether each of them exceeds the others in every one of at least two steps.
    every_step: bool


@dataclass(frozen=True, kw_only=True)
class RanksOutOfStep(Verdict):
    """Ranks wait for each other in turn; `latest_rank` arrives last most often."""

    cause: Literal["ranks_out_of_step"] = "ranks_out_of_step"
    latest_rank: str
    last_to_arrive: int
    collectives: int


@dataclass(frozen=True, kw_only=True)
class LateGathers(Verdict):
    """Gathers started after compute that could have hidden them."""

    cause: Literal["late_gathers"] = "late_gathers"
    gathers: float
    backward_gathers: float
    units: int
    on_cpu: bool


@dataclass(frozen=True, kw_only=True)
class QueuedGathers(Verdict):
    """Gathers that waited in the queue behind a reduce-scatter."""

    cause: Literal["queued_gathers"] = "queued_gathers"
    gathers: float


@dataclass(frozen=True, kw_only=True)
class SmallMessages(Verdict):
    """Messages whose time is latency, not bandwidth."""

    cause: Literal["small_messages"] = "small_messages"
    calls: float
    all_calls: float
    limit_bytes: int
    median_bytes: float


@dataclass(frozen=True, kw_only=True)
class SlowLink(Verdict):
    """Large messages reach only a share of the link's bandwidth."""

    cause: Literal["slow_link"] = "slow_link"
    operation: str
    reached_share: float


@dataclass(frozen=True, kw_only=True)
class ExposedCommunication(Verdict):
    """The remaining exposed time of an operation: longer than the compute it overlaps with.

    With `other_ranks_unknown`, part of it may be waiting: only one rank's trace was given.
    """

    cause: Literal["exposed_communication"] = "exposed_communication"
    operation: str
    calls: float
    exposed_share: float
    other_ranks_unknown: bool


@dataclass(frozen=True, kw_only=True)
class IdleDevice(Verdict):
    """Idle time of one cause; figures are those of the rank that loses most by it."""

    cause: IdleCause
    rank: str
    on_cpu: bool
    # Calls of the allocator, or synchronisations, where these are the cause.
    calls: float | None = None
    synchronised_by: str = ""
    data_loading_ns: float | None = None


@dataclass(frozen=True, kw_only=True)
class ExposedCopies(Verdict):
    """Copies with neither compute nor communication at the same time."""

    cause: Literal["exposed_copies"] = "exposed_copies"
    on_cpu: bool


@dataclass(frozen=True, kw_only=True)
class SlowMatmuls(Verdict):
    """Matmuls that reach only a share of the device's peak."""

    cause: Literal["slow_matmuls"] = "slow_matmuls"
    calls: float
    dtype: DType
    device: str
    reached_share: float


def mean(values: list[float]) -> float:
    return sum(values) / len(values)
