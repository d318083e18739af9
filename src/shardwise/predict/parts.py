"""One step in which devices, or their shares of it, differ: parts priced one by one.

Parts meet in the collectives of the last micro-batch. Each is priced as if all devices were like
its own, on the common network; the part that takes longest decides the step, and others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.step.profile import (
    MemoryProfile,
    PartProfile,
    StepProfile,
    WorkProfile,
    throughput_of,
)

T = TypeVar("T")
# Predicts a step of equal devices with equal shares.
Price = Callable[[Strategy, ClusterSpec], StepProfile]


class Part(NamedTuple):
    """Consecutive equal devices with equal shares; `cluster` is as if all devices were these."""

    devices: int
    cluster: ClusterSpec
    strategy: Strategy


def parts_of(run: RunSpec) -> list[Part]:
    """The parts of a run whose strategy is resolved, by rank."""
    cluster, strategy = run.cluster, run.strategy
    kinds = [(part.devices, cluster.as_if(part)) for part in cluster.parts or ()]
    shares = [
        (share.devices, strategy.but(accumulate=share.accumulate))
        for share in strategy.shares or ()
    ]
    clusters = _by_device(kinds) or [cluster] * strategy.devices
    strategies = _by_device(shares) or [strategy] * strategy.devices
    if len(clusters) != len(strategies):
        raise SpecError(
            f"cluster: has {len(clusters)} devices, and the strategy is for {len(strategies)}; "
            "make them the same"
        )
    found: list[Part] = []
    for one in zip(clusters, strategies, strict=True):
        if found and found[-1].cluster is one[0] and found[-1].strategy is one[1]:
            found[-1] = found[-1]._replace(devices=found[-1].devices + 1)
        else:
            found.append(Part(1, *one))
    return found


def _by_device(parts: Sequence[tuple[int, T]]) -> list[T]:
    """What each device has, given that of so many consecutive ones."""
    return [value for devices, value in parts for _ in range(devices)]


def price_parts(run: RunSpec, price: Price) -> StepProfile:
    """Predict one step of a run whose devices or shares differ."""
    parts = parts_of(run)
    priced = [price(part.strategy, part.cluster) for part in parts]
    slowest = max(priced, key=lambda one: one.time.step_s if one.time else 0.0)
    known = all(one.time is not None for one in priced)
    step_s = slowest.time.step_s if known and slowest.time else None
    work = _work(run, parts, priced)
    fullest = max((one.known_memory for one in priced), key=_fullness)
    first = priced[0]
    return first._replace(
        cluster={
            **first.cluster,
            "name": str(run.cluster),
            "devices": run.cluster.devices,
            "nodes": run.cluster.nodes,
        },
        strategy=run.strategy.model_dump(mode="json", exclude={"within_node"}),
        memory=fullest,
        work=work,
        time=slowest.time if known else None,
        throughput=None
        if step_s is None
        else throughput_of(work, step_s, run.cluster.devices, _peak_flops(run, parts)),
        bottleneck=slowest.bottleneck if known else None,
        parts=tuple(_told(*one, step_s) for one in zip(parts, priced, strict=True)),
    )


def _told(part: Part, priced: StepProfile, step_s: float | None) -> PartProfile:
    """The profile of one part of a step that takes `step_s` seconds."""
    own = priced.time.step_s if priced.time is not None else None
    return PartProfile(
        device=part.cluster.device.name,
        devices=part.devices,
        accumulate=part.strategy.accumulate,
        memory=priced.known_memory,
        step_s=own,
        waiting_s=None if own is None or step_s is None else step_s - own,
    )


def _work(run: RunSpec, parts: Sequence[Part], priced: Sequence[StepProfile]) -> WorkProfile:
    """Tokens and FLOPs of the step: of each part, what its devices have of those of all."""
    known = [one.work for one in priced if one.work is not None]
    shares = [part.devices / run.cluster.devices for part in parts]
    model, hardware = (
        sum(share * float(getattr(one, name)) for share, one in zip(shares, known, strict=True))
        for name in ("model_flops", "hardware_flops")
    )
    tokens = run.job.tokens_per_step(run.strategy)
    return WorkProfile(tokens, model, hardware, known[0].convention)


def _fullness(memory: MemoryProfile) -> float:
    """Needed bytes per usable byte."""
    return (memory.needed_bytes or memory.peak_allocated_bytes) / max(1, memory.usable_bytes or 1)


def _peak_flops(run: RunSpec, parts: Sequence[Part]) -> float | None:
    """The mean dense peak of a device in FLOP/s; None if one is unknown."""
    dtype = run.strategy.param_dtype
    peaks = [part.cluster.device.peak_flops(dtype) for part in parts]
    if any(peak is None for peak in peaks):
        return None
    total = sum(part.devices * (peak or 0.0) for part, peak in zip(parts, peaks, strict=True))
    return total / run.cluster.devices
