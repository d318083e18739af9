"""When it does not fit: what breaks it, and the smallest changes that would mend it."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.predict.estimate import verdicts
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.quantity import show_gib
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.step import StepProfile
from shardwise.units.unit import ModelUnits

# These shrink as more devices share them; all others are the same on any number of devices.
SHRINKING = ("parameters", "gradients", "optimizer")
MOST_DEVICES = 2**17


@dataclass(frozen=True, kw_only=True)
class Change:
    """One way to make it fit, in words, and the peak it leads to."""

    text: str
    peak_bytes: int


def why_not(profile: StepProfile, strategy: Strategy) -> list[str]:
    """Sentences that name the terms that break it, the largest first."""
    memory = profile.memory
    capacity = memory.capacity_bytes or 0
    terms = sorted(memory.terms.items(), key=lambda term: -term[1])
    sentences = []
    name, size = terms[0]
    if size > capacity:
        sentences.append(f"{_words(name).capitalize()} alone take {show_gib(size)}.")
    else:
        largest = [f"{_words(n)} {show_gib(s)}" for n, s in terms[:3] if s]
        sentences.append(f"Most of it: {', '.join(largest)}.")
    fixed = sum(s for n, s in memory.terms.items() if n not in SHRINKING)
    if strategy.sharded and fixed > capacity:
        sentences.append(
            f"No number of devices helps: {show_gib(fixed)} of the peak stay however many there "
            "are."
        )
    if strategy.kind in ("zero1", "zero2") and memory.terms["unsharded_parameters"] > capacity:
        sentences.append(
            f"{strategy.kind} keeps the whole model gathered on every device during a step; zero3 "
            "gathers one unit at a time."
        )
    return sentences


def _words(term: str) -> str:
    return term.replace("unsharded_parameters", "gathered parameters").replace("_", " ")


def ways_to_fit(
    units: ModelUnits, strategy: Strategy, cluster: ClusterSpec, job: Job
) -> list[Change]:
    """Changes of one or two settings, and of the number of devices, after which it fits."""
    grouped = units.grouped(strategy.blocks_per_unit)
    tried: list[tuple[str, Strategy]] = []
    for text, changes in _changes(strategy, cluster):
        try:
            resolved = strategy.but(**changes).resolve(cluster.devices, cluster.devices_per_node)
        except SpecError:
            continue
        tried.append((text, resolved))
    results = verdicts(grouped, [s for _, s in tried], cluster, job) if tried else []
    fitting = [
        Change(text=text, peak_bytes=peak)
        for (text, _), (answer, peak) in zip(tried, results, strict=True)
        if answer == "fits"
    ]
    more = _more_devices(grouped, strategy, cluster, job)
    return fitting[:3] + ([more] if more else [])


_UNSET: dict[str, object] = {
    "shard": None,
    "replicate": None,
    "reshard_after_forward": None,
    "reshard_after_backward": None,
    "grad_sync": None,
}


def _changes(strategy: Strategy, cluster: ClusterSpec) -> list[tuple[str, dict[str, object]]]:
    """Candidate changes, the smallest first."""
    zero3 = {"kind": "zero3", **_UNSET}
    single: list[tuple[str, dict[str, object]]] = []
    if strategy.micro_batch > 1:
        single.append(("micro-batch 1", {"micro_batch": 1}))
    if strategy.recompute != "full":
        single.append(("full recompute", {"recompute": "full"}))
    if strategy.kind != "zero3" and cluster.devices > 1:
        single.append(("zero3", zero3))
    elif strategy.hybrid:
        single.append((f"zero3 sharded over all {cluster.devices} devices", zero3))
    pairs = [
        (f"{one} and {other}", {**first, **second})
        for index, (one, first) in enumerate(single)
        for other, second in single[index + 1 :]
    ]
    everything: dict[str, object] = {
        key: value for _, change in single for key, value in change.items()
    }
    last = []
    if len(single) > 2:
        last.append((", ".join(text for text, _ in single), everything))
    if cluster.devices > 1 and not strategy.offload:
        words = [text for text, _ in single]
        last.append((", ".join([*words, "CPU offload"]), {**everything, "offload": True}))
    return single + pairs + last


def _more_devices(
    units: ModelUnits, strategy: Strategy, cluster: ClusterSpec, job: Job
) -> Change | None:
    """The least power-of-two multiple of the cluster on which the same strategy fits."""
    if not strategy.sharded or strategy.hybrid:
        return None
    counts = []
    count = cluster.devices * 2
    while count <= MOST_DEVICES:
        counts.append(count)
        count *= 2
    changed = [strategy.but(shard=n, replicate=1) for n in counts]
    for n, (answer, peak) in zip(counts, verdicts(units, changed, cluster, job), strict=True):
        if answer == "fits":
            return Change(text=f"{n} devices", peak_bytes=peak)
    return None
