"""When it does not fit: what takes the memory, and the smallest changes after which it fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple

from shardwise.predict.configurations import Configurations
from shardwise.predict.estimate import needed_bytes, verdict
from shardwise.predict.memory import predict_memory
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.families import DIVISIBLE
from shardwise.spec.job import Job
from shardwise.spec.lookup import Model
from shardwise.spec.optimizer import SMALLER, Optimizer
from shardwise.spec.optimizer_sharding import is_trained_with
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.step.profile import StepProfile, Verdict
from shardwise.units.division import Division
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


Parallelism = Literal["expert", "tensor", "pipeline"]


def other_parallelism(model: Model) -> tuple[Parallelism, ...]:
    """Parallelism that reduces memory per device and that shardwise does not run for this model.

    The most useful first: experts hold most of a mixture's parameters.
    """
    if getattr(model, "experts", None) is not None:
        return ("expert", "pipeline")
    divisible = getattr(model, "family", None) in DIVISIBLE and model.adapter is None
    return ("pipeline",) if divisible else ("tensor", "pipeline")


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


Changes = dict[str, object]


class _Tried(NamedTuple):
    """Options to type, and the resolved strategy that a run with them has."""

    options: str
    strategy: Strategy


def ways_to_fit(
    units_of: Callable[[Strategy], ModelUnits],
    strategy: Strategy,
    cluster: ClusterSpec,
    job: Job,
    *,
    base: Strategy | None = None,
    applied: Callable[[Strategy], Strategy] | None = None,
    trains: Callable[[Optimizer, Strategy], bool] = is_trained_with,
    chunked: bool = False,
) -> list[Change]:
    """The smallest changes of settings, then of the number of devices, after which it fits.

    Options are complete: added to a command whose strategy is `base` (`strategy` itself where none
    is given), they give the needed bytes that are stated. `units_of` gives the model's units, one
    block each, `applied` a strategy as the stack that trains it runs it, `trains` whether an
    optimizer runs with it. With `chunked` the loss can run in chunks.

    Where none fits safely, what is at risk is offered, unless the strategy itself already is.
    """
    command = base or strategy
    runs, trained = applied or (lambda typed: typed), trains(job.optimizer, strategy)

    def tried(changed: Iterable[Strategy], where: ClusterSpec) -> Iterator[_Tried]:
        for wanted in changed:
            typed = _typed(command, wanted, where, job)
            if typed is not None and (applied is not None or typed.strategy == wanted):
                yield from _as_run(typed, runs)

    def judged(wanted: Verdict, ways: Iterable[_Tried], of: Job = job) -> list[Change]:
        kept = [way for way in ways if not trained or trains(of.optimizer, way.strategy)]
        return _those_that_are(wanted, units_of, kept, cluster, of)

    own = _resolved(strategy, {}, cluster, job)
    unfit = own is not None and judged("does not fit", [_Tried("", runs(own))])
    unset = {name: getattr(command, name) for name in _NO_OPTION}
    resolved = (
        _resolved(strategy, {**unset, **changes}, cluster, job)
        for changes in _candidates(strategy, cluster, chunked)
    )
    here = [way for way in tried((s for s in resolved if s), cluster) if way.options]
    alike = [*tried([own] if own else [], cluster), *here]
    for wanted in ("fits", "at risk") if unfit else ("fits",):
        fitting = _useful(judged(wanted, dict.fromkeys(here)))
        free = [way for way in fitting if not way.host_bytes]
        # Smaller states change the arithmetic and offload is slow: only when nothing else fits.
        if not free and not applied:
            fitting = [*judged(wanted, *_with_smaller_states(alike, job))[:1], *fitting]
        ways = (free or fitting)[:MOST_WAYS]
        if len(ways) < MOST_WAYS:
            for recompute in dict.fromkeys((strategy.recompute, "full")):
                more = _on_more_devices(strategy.but(**unset, recompute=recompute), cluster, job)
                larger = [way for where, s in more for way in tried([s], where)]
                if found := judged(wanted, larger):
                    ways.append(found[0])
                    break
        if ways:
            return ways
    return []


def _with_smaller_states(ways: Iterable[_Tried], job: Job) -> tuple[list[_Tried], Job]:
    """The same with optimizer states in fewer bits, and the job they then are for."""
    smaller = SMALLER.get(job.optimizer)
    if smaller is None:
        return [], job
    option = f"--optimizer {smaller}"
    kept = [way for way in dict.fromkeys(ways) if not way.strategy.offload]
    made = [way._replace(options=f"{option} {way.options}".strip()) for way in kept]
    return made, job.but(optimizer=smaller)


def _useful(ways: list[Change]) -> list[Change]:
    """Without those that add options to another and save next to nothing by it."""
    return [
        way
        for way in ways
        if not any(
            set(other.options.split()) < set(way.options.split())
            and way.needed_bytes > 0.99 * other.needed_bytes
            for other in ways
        )
    ]


# Settings that no option of `estimate` sets.
_NO_OPTION = ("forward_prefetch", "ddp_bucket_mib", "compile")
_OPTIONS = {
    "micro_batch": "--micro-batch",
    "accumulate": "--accumulate",
    "recompute": "--recompute",
    "grad_sync": "--grad-sync",
    "reshard_after_forward": "--reshard-after-forward",
    "blocks_per_unit": "--blocks-per-unit",
    "prefetch": "--prefetch",
    "loss": "--loss",
    "split_root": "--split-root",
    "offload": "--offload",
}
_FLAGS = ("split_root", "offload")
# What another kind sets anew, unless the command sets it.
_BY_KIND = ("grad_sync", "reshard_after_forward")


def _resolved(
    strategy: Strategy, changes: Changes, cluster: ClusterSpec, job: Job
) -> Strategy | None:
    """A changed strategy as a run has it; None where it is not possible."""
    try:
        changed = strategy.but(**changes).resolve(cluster.devices, cluster.devices_per_node)
        return job.split(changed)
    except SpecError:
        return None


def _as_run(typed: _Tried, runs: Callable[[Strategy], Strategy]) -> Iterator[_Tried]:
    """As a stack runs it; nothing where it has no such layout."""
    try:
        yield typed._replace(strategy=runs(typed.strategy))
    except SpecError:
        return


def _quoted(text: str) -> str:
    """As a shell takes it."""
    return f'"{text}"' if " " in text else text


def _typed(base: Strategy, wanted: Strategy, cluster: ClusterSpec, job: Job) -> _Tried | None:
    """All options that turn a command with the strategy `base` into one with `wanted`.

    None where options cannot say it.
    """
    moved = base.devices != wanted.devices
    options = [f"--cluster {cluster}"] if moved else []
    start, explicit = base, set()
    if moved or base.shorthand != wanted.shorthand:
        options.append(f"--strategy {_quoted(wanted.shorthand)}")
        usual = _resolved(base.as_kind(base.shorthand), {"replicate": base.replicate}, cluster, job)
        explicit = {n for n in _BY_KIND if usual and getattr(base, n) != getattr(usual, n)}
        try:
            start = base.as_kind(wanted.shorthand)
        except SpecError:
            return None
    before = _resolved(start, {}, cluster, job)
    if before is None or any(getattr(before, n) and not getattr(wanted, n) for n in _FLAGS):
        return None
    fields: Changes = {}
    for name, option in _OPTIONS.items():
        value = getattr(wanted, name)
        if value == getattr(before, name) and name not in explicit:
            continue
        if name == "accumulate" and job.global_batch is not None:
            continue  # follows from the global batch
        fields[name] = value
        text = str(value).lower() if isinstance(value, bool) else f"{value}"
        options.append(option if name in _FLAGS else f"{option} {text}")
    after = _resolved(start, fields, cluster, job)
    return _Tried(" ".join(options), after) if after is not None else None


def _those_that_are(
    wanted: Verdict,
    units_of: Callable[[Strategy], ModelUnits],
    tried: Iterable[_Tried],
    cluster: ClusterSpec,
    job: Job,
) -> list[Change]:
    """Those with a verdict, in their order."""
    ways = list(tried)
    alike: dict[tuple[int, bool, Division], list[int]] = {}
    for index, (_, strategy) in enumerate(ways):
        key = strategy.blocks_per_unit, strategy.autocast, Division.of(strategy)
        alike.setdefault(key, []).append(index)
    found: dict[int, Change] = {}
    for (blocks, *_), indices in alike.items():
        strategies = [ways[index].strategy for index in indices]
        memory = predict_memory(
            units_of(strategies[0]).grouped(blocks),
            Configurations.of(strategies),
            job.optimizer,
        )
        figures = zip(memory.peak_bytes, memory.host_bytes, memory.pooled_bytes, strict=True)
        for index, sizes in zip(indices, figures, strict=True):
            peak, host, pooled = (round(float(size)) for size in sizes)
            if verdict(peak, cluster.device, pooled) == wanted:
                needed = needed_bytes(peak, cluster.device, pooled)
                found[index] = Change(ways[index].options, needed, host, wanted == "at risk")
    return [found[index] for index in sorted(found)]


_UNSET: dict[str, object] = {
    "shard": None,
    "replicate": None,
    "reshard_after_forward": None,
    "reshard_after_backward": None,
    "grad_sync": None,
}


def _candidates(strategy: Strategy, cluster: ClusterSpec, chunked: bool) -> Iterator[Changes]:
    """One change first, then two, then three, then with offload."""
    loss: list[Changes] = [{"loss": "chunked"}] if chunked and strategy.loss == "plain" else []
    recompute: list[Changes] = [{"recompute": "full"}] if strategy.recompute != "full" else []
    batch: list[Changes] = []
    smaller = strategy.micro_batch // 2
    while smaller >= 1:
        batch.append({"micro_batch": smaller})
        smaller //= 2
    sharding = list(_shardings(strategy, cluster))
    yield from (*loss, *batch, *recompute, *sharding)
    two = [b | r for b in batch for r in recompute]
    two += [s | r for s in sharding for r in recompute]
    two += [s | b for s in sharding for b in batch[-1:]]
    three = [s | b | r for s in sharding for b in batch[-1:] for r in recompute]
    yield from (x | one for x in loss for one in (*recompute, *batch, *sharding))
    yield from two
    yield from (x | pair for x in loss for pair in two)
    yield from three
    yield from (x | all_ for x in loss for all_ in three)
    if not cluster.device.is_cpu and not strategy.offload:
        kind: Changes = {} if strategy.sharded else {"kind": "zero3", **_UNSET}
        offload = {**kind, "offload": True}
        yield offload
        yield from (offload | r for r in (*loss, *recompute))
        yield from (offload | b | r for b in batch[-1:] for r in recompute)
        yield from (offload | x | r for x in loss for r in recompute)


def _shardings(strategy: Strategy, cluster: ClusterSpec) -> Iterator[Changes]:
    """Full sharding, then smaller and smaller groups, which pad less."""
    devices = cluster.devices // strategy.mesh.inner
    if devices == 1:
        return
    if strategy.kind != "zero3" or strategy.hybrid:
        yield {"kind": "zero3", **_UNSET}
    for group in range(devices // 2, 1, -1):
        if devices % group == 0 and group != strategy.shard:
            yield {"kind": "zero3", **_UNSET, "shard": group}


def _on_more_devices(
    strategy: Strategy, cluster: ClusterSpec, job: Job
) -> Iterator[tuple[ClusterSpec, Strategy]]:
    """ZeRO-3 on more devices, in steps of a third to a half; a single node is filled first."""
    own = cluster.devices_per_node
    per_node = max(own, cluster.device.node_size) if cluster.nodes == 1 else own
    doubled = cluster.devices * 2
    while doubled <= MOST_DEVICES:
        for count in (doubled, doubled * 3 // 2):
            size = min(per_node, count)
            if count % size == 0:
                larger = cluster.but(nodes=count // size, devices_per_node=size)
                resolved = _resolved(strategy, {"kind": "zero3", **_UNSET}, larger, job)
                if resolved is not None:
                    yield larger, resolved
        doubled *= 2
