"""When it does not fit: what takes the memory, and the smallest changes after which it fits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardwise.predict.configurations import Configurations
from shardwise.predict.estimate import needed_bytes, verdict
from shardwise.predict.memory import predict_memory
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import OPTIMIZER_STATES, Job
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.step import StepProfile, Verdict
from shardwise.units.unit import ModelUnits

# These shrink as more devices share them; all others are the same on any number of devices.
SHRINKING = ("parameters", "gradients", "optimizer")
MOST_DEVICES = 2**17
MOST_WAYS = 3


class Change(NamedTuple):
    """One way to make it fit: options to type, what it needs then, and of the host."""

    options: str
    needed_bytes: int
    host_bytes: int = 0
    # Only likely to fit; offered where nothing else is.
    at_risk: bool = False


class Shortfall(NamedTuple):
    """Why a step does not fit."""

    largest_term: str
    largest_bytes: int
    # What stays on each device however many there are, where that alone is too much.
    unshrinking_bytes: int | None
    # ZeRO-1 and ZeRO-2 keep all parameters gathered, where those alone are too much.
    keeps_all_gathered: bool


def shortfall_of(profile: StepProfile, strategy: Strategy) -> Shortfall:
    """The largest term of a step that does not fit, and what no number of devices would change."""
    memory = profile.known_memory
    usable = memory.usable_bytes or 0
    largest = max(memory.terms, key=lambda term: memory.terms[term])
    fixed = sum(size for term, size in memory.terms.items() if term not in SHRINKING)
    keeps = strategy.kind in ("zero1", "zero2")
    return Shortfall(
        largest_term=largest,
        largest_bytes=memory.terms[largest],
        unshrinking_bytes=fixed if strategy.sharded and fixed > usable else None,
        keeps_all_gathered=keeps and memory.terms["unsharded_parameters"] > usable,
    )


def ways_to_fit(
    units: ModelUnits, strategy: Strategy, cluster: ClusterSpec, job: Job
) -> list[Change]:
    """The smallest changes of settings, then of the number of devices, after which it fits.

    Where none fits within the usable memory, what is at risk is offered, unless that is what
    the strategy itself already is.
    """
    tried: list[tuple[str, Strategy]] = []
    for options, changes in _candidates(strategy, cluster):
        try:
            changed = strategy.but(**changes)
            resolved = changed.resolve(cluster.devices, cluster.devices_per_node)
        except SpecError:
            continue
        tried.append((options, resolved))
    for wanted in _better_verdicts(units, strategy, cluster, job):
        fitting = _those_that_are(wanted, units, tried, cluster, job)
        free = [way for way in fitting if not way.host_bytes]
        # Offload is slow and asks for host memory: only when nothing else does.
        ways = (free or fitting)[:MOST_WAYS]
        more = _more_devices(wanted, units, strategy, cluster, job)
        ways += [more] if more and len(ways) < MOST_WAYS else []
        if ways:
            return ways
    return []


def _better_verdicts(
    units: ModelUnits, strategy: Strategy, cluster: ClusterSpec, job: Job
) -> tuple[Verdict, ...]:
    resolved = strategy.resolve(cluster.devices, cluster.devices_per_node)
    unfit = _those_that_are("does not fit", units, [("", resolved)], cluster, job)
    return ("fits", "at risk") if unfit else ("fits",)


def _those_that_are(
    wanted: Verdict,
    units: ModelUnits,
    tried: list[tuple[str, Strategy]],
    cluster: ClusterSpec,
    job: Job,
) -> list[Change]:
    if not tried:
        return []
    grouped = units.grouped(tried[0][1].blocks_per_unit)
    memory = predict_memory(
        grouped, Configurations.of([s for _, s in tried]), OPTIMIZER_STATES[job.optimizer]
    )
    return [
        Change(
            options,
            needed_bytes(round(float(peak)), cluster.device, round(float(pooled))),
            round(float(host)),
            wanted == "at risk",
        )
        for (options, _), peak, host, pooled in zip(
            tried, memory.peak_bytes, memory.host_bytes, memory.pooled_bytes, strict=True
        )
        if verdict(round(float(peak)), cluster.device, round(float(pooled))) == wanted
    ]


_UNSET: dict[str, object] = {
    "shard": None,
    "replicate": None,
    "reshard_after_forward": None,
    "reshard_after_backward": None,
    "grad_sync": None,
}


def _candidates(
    strategy: Strategy, cluster: ClusterSpec
) -> Iterator[tuple[str, dict[str, object]]]:
    """Options and the fields they set: one change first, then two, then with offload."""
    recompute: list[tuple[str, dict[str, object]]] = []
    if strategy.recompute != "full":
        recompute = [("--recompute full", {"recompute": "full"})]
    batch: list[tuple[str, dict[str, object]]] = []
    smaller = strategy.micro_batch // 2
    while smaller >= 1:
        batch.append((f"--micro-batch {smaller}", {"micro_batch": smaller}))
        smaller //= 2
    sharding = list(_shardings(strategy, cluster))
    yield from (*batch, *recompute, *sharding)
    yield from (_both(b, r) for b in batch for r in recompute)
    yield from (_both(s, r) for s in sharding for r in recompute)
    yield from (_both(s, b) for s in sharding for b in batch[-1:])
    yield from (_both(_both(s, b), r) for s in sharding for b in batch[-1:] for r in recompute)
    if not cluster.device.is_cpu and not strategy.offload:
        offload: tuple[str, dict[str, object]] = ("--offload", {"offload": True})
        if not strategy.sharded:
            offload = ("--strategy zero3 --offload", {"kind": "zero3", **_UNSET, "offload": True})
        yield offload
        yield from (_both(offload, r) for r in recompute)
        yield from (_both(_both(offload, b), r) for b in batch[-1:] for r in recompute)


def _both(
    one: tuple[str, dict[str, object]], other: tuple[str, dict[str, object]]
) -> tuple[str, dict[str, object]]:
    return f"{one[0]} {other[0]}", {**one[1], **other[1]}


def _shardings(strategy: Strategy, cluster: ClusterSpec) -> Iterator[tuple[str, dict[str, object]]]:
    """Full sharding, then smaller and smaller groups, which pad less."""
    if cluster.devices == 1:
        return
    if strategy.kind != "zero3" or strategy.hybrid:
        yield "--strategy zero3", {"kind": "zero3", **_UNSET}
    group = cluster.devices // 2
    while group > 1 and cluster.devices % group == 0:
        if group != strategy.shard:
            yield f"--strategy zero3:{group}", {"kind": "zero3", **_UNSET, "shard": group}
        group //= 2


def _more_devices(
    wanted: Verdict, units: ModelUnits, strategy: Strategy, cluster: ClusterSpec, job: Job
) -> Change | None:
    """The least power-of-two multiple of the cluster on which zero3 fits, with full recompute if
    it must be.
    """
    for recompute in dict.fromkeys((strategy.recompute, "full")):
        tried = []
        count = cluster.devices * 2
        while count <= MOST_DEVICES:
            changes = {**_UNSET, "kind": "zero3", "recompute": recompute, "shard": count}
            resolved = strategy.but(**changes).resolve(count, cluster.devices_per_node)
            words = f"{count} devices with --strategy zero3"
            extra = "" if recompute == strategy.recompute else " --recompute full"
            tried.append((words + extra, resolved))
            count *= 2
        for way in _those_that_are(wanted, units, tried, cluster, job):
            return way
    return None
