"""When it does not fit: what breaks it, and the smallest changes that would mend it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shardwise.predict.configurations import Configurations
from shardwise.predict.estimate import verdict
from shardwise.predict.memory import predict_memory
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import OPTIMIZER_STATES, Job
from shardwise.spec.quantity import show_gib
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.step import StepProfile, Verdict
from shardwise.units.unit import ModelUnits

# These shrink as more devices share them; all others are the same on any number of devices.
SHRINKING = ("parameters", "gradients", "optimizer")
MOST_DEVICES = 2**17
MOST_WAYS = 3


class Change(NamedTuple):
    """One way to make it fit: options to type, the peak, and memory it asks of the host."""

    options: str
    peak_bytes: int
    host_bytes: int = 0
    # Only likely to fit; named where nothing is safe.
    at_risk: bool = False


def why_not(profile: StepProfile, strategy: Strategy) -> list[str]:
    """Sentences that name the terms that break it, the largest first."""
    memory = profile.known_memory
    capacity = memory.capacity_bytes or 0
    terms = sorted(memory.terms.items(), key=lambda term: -term[1])
    name, size = terms[0]
    if size > capacity:
        sentences = [f"{words_for(name).capitalize()} alone take {show_gib(size)}."]
    else:
        largest = [f"{words_for(n)} {show_gib(s)}" for n, s in terms[:3] if s]
        sentences = [f"Most of it: {', '.join(largest)}."]
    fixed = sum(s for n, s in memory.terms.items() if n not in SHRINKING)
    if strategy.sharded and fixed > capacity:
        sentences.append(
            f"Adding devices alone does not help: {show_gib(fixed)} of the peak stay on each, "
            "however many there are."
        )
    if strategy.kind in ("zero1", "zero2") and memory.terms["unsharded_parameters"] > capacity:
        sentences.append(
            f"{strategy.kind} keeps the whole model gathered on every device during a step; zero3 "
            "gathers one unit at a time."
        )
    return sentences


def words_for(term: str) -> str:
    """A term of the ledger as people say it."""
    named = {
        "optimizer": "optimizer states",
        "unsharded_parameters": "gathered parameters",
        "unsharded_gradients": "unsharded gradients",
        "logits": "logits and loss",
    }
    return named.get(term, term.replace("_", " "))


def ways_to_fit(
    units: ModelUnits, strategy: Strategy, cluster: ClusterSpec, job: Job
) -> list[Change]:
    """The smallest changes of settings, then of the number of devices, after which it fits."""
    tried: list[tuple[str, Strategy]] = []
    for options, changes in _candidates(strategy, cluster):
        try:
            changed = strategy.but(**changes)
            resolved = changed.resolve(cluster.devices, cluster.devices_per_node)
        except SpecError:
            continue
        tried.append((options, resolved))
    verdicts: tuple[Verdict, ...] = ("fits", "at risk")
    for wanted in verdicts:
        fitting = _those_that_are(wanted, units, tried, cluster, job)
        free = [way for way in fitting if not way.host_bytes]
        # Offload is slow and asks for host memory: only when nothing else does.
        ways = (free or fitting)[:MOST_WAYS]
        more = _more_devices(wanted, units, strategy, cluster, job)
        ways += [more] if more and len(ways) < MOST_WAYS else []
        if ways:
            return ways
    return []


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
        Change(options, round(float(peak)), round(float(host)), wanted == "at risk")
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
