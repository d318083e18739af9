"""The difference between two points of a what-if: how much faster, and what changed."""

from __future__ import annotations

from typing import Literal, NamedTuple

from shardwise.planning.problem import Units
from shardwise.planning.rows import Candidate
from shardwise.planning.whatif import Point
from shardwise.predict.configurations import Configurations
from shardwise.predict.work import predict_work
from shardwise.spec.strategy import Strategy

# Relative differences in compute per token below this are ignored.
SAME_COMPUTE = 0.005


class Difference(NamedTuple):
    """What changed between two points of a what-if.

    Causes (recompute, exposed, contention) are named only if they explain the change of MFU: a cost
    that fell if MFU rose, or rose if MFU fell; else None. Pairs are (before, after).
    """

    # tokens/s after over before.
    speed: float
    # MFU after minus before.
    mfu: float
    strategies: tuple[Strategy, Strategy]
    # FLOPs of recomputation grew or shrank.
    recompute: Literal["more", "less"] | None = None
    layout_changed: bool = False
    micro_batch_changed: bool = False
    # Shares of the step that wait for communication.
    exposed: tuple[float, float] | None = None
    # Peak FLOP/s after over before.
    peak: float | None = None
    # Compute per token slowed by communication that overlaps it.
    contention: Literal["more", "less"] | None = None


def difference(before: Point, after: Point) -> Difference | None:
    """The difference between two points; None if no configuration fits at one of them."""
    one, other = before.candidate, after.candidate
    if one is None or other is None or before.mfu is None or after.mfu is None:
        return None
    was, now = one.strategy, other.strategy
    better = after.mfu > before.mfu
    devices = [point.problem.cluster.device for point in (before, after)]
    other_device = devices[0].name != devices[1].name
    recompute = None
    if was.recompute != now.recompute:
        recompute = _direction(_recomputed(before, one), _recomputed(after, other), better)
    exposed = (one.exposed_s / one.step_s, other.exposed_s / other.step_s)
    peaks = [device.peak_flops(was.param_dtype) for device in devices]
    peak = peaks[1] / peaks[0] if other_device and peaks[0] and peaks[1] else None
    contention = None
    if not other_device and (was.recompute, was.micro_batch) == (now.recompute, now.micro_batch):
        each = _compute_per_token(before, one), _compute_per_token(after, other)
        if abs(each[1] / each[0] - 1) >= SAME_COMPUTE:
            contention = _direction(*each, better)
    return Difference(
        speed=other.tokens_per_s / one.tokens_per_s,
        mfu=after.mfu - before.mfu,
        strategies=(was, now),
        recompute=recompute,
        layout_changed=str(was) != str(now),
        micro_batch_changed=was.micro_batch != now.micro_batch,
        exposed=exposed if _direction(*exposed, better) else None,
        peak=peak,
        contention=contention,
    )


def _direction(before: float, after: float, better: bool) -> Literal["more", "less"] | None:
    """Whether a cost rose or fell; None if that does not explain whether MFU got better."""
    if before == after or (after < before) != better:
        return None
    return "less" if after < before else "more"


def _compute_per_token(point: Point, candidate: Candidate) -> float:
    """Seconds of compute per step and device, divided by all tokens of the step."""
    return candidate.compute_s / point.problem.job.tokens_per_step(candidate.strategy)


def _recomputed(point: Point, candidate: Candidate) -> float:
    """FLOPs of recomputation per FLOP of the model."""
    units = Units(point.problem).of(candidate.strategy)
    work = predict_work(units, Configurations.of([candidate.strategy]))
    return float(work.hardware_flops[0] / work.model_flops[0]) - 1
