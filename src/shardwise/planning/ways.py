"""The smallest changes of a command that make a configuration fit in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from shardwise.planning.alternatives import smaller_adapters
from shardwise.planning.problem import Problem, Units
from shardwise.planning.space import Space
from shardwise.predict.configurations import Configurations
from shardwise.predict.estimate import needed_bytes, verdict
from shardwise.predict.memory import predict_memory
from shardwise.spec.adapter import with_adapter
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizer import SMALLER_VARIANTS
from shardwise.spec.record import SpecError
from shardwise.spec.states import offload_option
from shardwise.spec.strategy import Loss, Strategy
from shardwise.step.profile import Verdict

MOST_DEVICES = 2**17
MOST_WAYS = 3


class Change(NamedTuple):
    """A change that makes a run fit: options to type, and bytes then needed (device and host)."""

    options: str
    needed_bytes: int
    host_bytes: int = 0
    # Whether it is only likely to fit; such changes are offered only if no other exists.
    at_risk: bool = False


FieldChanges = dict[str, object]


class _Attempt(NamedTuple):
    """Options to type, and the resolved strategy of a run with these options."""

    options: str
    strategy: Strategy


def changes_to_fit(
    problem: Problem, strategy: Strategy, space: Space, units: Units
) -> list[Change]:
    """The smallest changes after which `strategy` fits: of settings, then of the device count.

    Options are complete: added to a command whose strategy is the base of the problem, they give
    the stated needed bytes.

    If no change fits safely, changes that are at risk are returned, unless `strategy` itself is at
    risk already.
    """
    command, cluster, job = problem.base, problem.cluster, problem.job
    trained = space.trains(job.optimizer, strategy)

    def tried(changed: Iterable[Strategy], where: ClusterSpec) -> Iterator[_Attempt]:
        for wanted in changed:
            typed = _options_between(command, wanted, where, job)
            if typed is not None and (space.for_stack or typed.strategy == wanted):
                yield from _as_stack_runs(typed, space)

    def judged(
        wanted: Verdict, ways: Iterable[_Attempt], of: Job = job, of_model: Units = units
    ) -> list[Change]:
        kept = [way for way in ways if not trained or space.trains(of.optimizer, way.strategy)]
        return _with_verdict(wanted, of_model, kept, cluster, of)

    own = _resolve_with(strategy, {}, cluster, job)
    unfit = own is not None and judged("does not fit", [_Attempt("", space.applied(own))])
    unset = {name: getattr(command, name) for name in _NO_OPTION}
    losses = tuple(loss for loss in space.losses if loss != "plain") if units.can_chunk else ()
    resolved = (
        _resolve_with(strategy, {**unset, **changes}, cluster, job)
        for changes in _candidates(strategy, cluster, losses)
    )
    here = [way for way in tried((s for s in resolved if s), cluster) if way.options]
    alike = [*tried([own] if own else [], cluster), *here]
    for wanted in ("fits", "at risk") if unfit else ("fits",):
        fitting = _drop_redundant(judged(wanted, dict.fromkeys(here)))
        free = [way for way in fitting if not way.host_bytes]
        # Less precise ones change the arithmetic and offload is slow: only when nothing else fits.
        if not free and not space.for_stack:
            stored = [
                judged(wanted, *smaller)[:1] for smaller in _stored_smaller(problem, units, alike)
            ]
            fitting = [*chain(*stored), *fitting]
        # More devices keep a place beside changes that are slow.
        ways = free[:MOST_WAYS] or fitting[: MOST_WAYS - 1]
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


def _stored_smaller(
    problem: Problem, units: Units, ways: Sequence[_Attempt]
) -> Iterator[tuple[list[_Attempt], Job, Units]]:
    """The changes with smaller optimizer states, then with a smaller base of an adapter.

    Each with the job and the model's units then.
    """
    model, job = problem.model, problem.job
    optimizer = SMALLER_VARIANTS.get(job.optimizer)
    if optimizer is not None:
        kept = _with_option(f"--optimizer {optimizer}", ways)
        yield kept, job.but(optimizer=optimizer), units
    # A model that is not a ModelSpec would be traced again, which takes seconds.
    if not isinstance(model, ModelSpec) or model.adapter is None:
        return
    for adapter in smaller_adapters(model.adapter):
        if with_adapter(model.adapter, str(adapter)) == adapter:
            adapted = Units(problem._replace(model=model.but(adapter=adapter)))
            yield _with_option(f"--adapter {adapter}", ways), job, adapted


def _with_option(option: str, ways: Iterable[_Attempt]) -> list[_Attempt]:
    """The changes without offload, each with another option."""
    kept = [way for way in dict.fromkeys(ways) if not way.strategy.offload]
    return [way._replace(options=f"{option} {way.options}".strip()) for way in kept]


def _drop_redundant(ways: list[Change]) -> list[Change]:
    """The changes, without those that only add options to another one and save less than 1 %."""
    return [
        way
        for way in ways
        if not any(
            set(other.options.split()) < set(way.options.split())
            and way.needed_bytes > 0.99 * other.needed_bytes
            for other in ways
        )
    ]


# Settings that cannot be set by options of `estimate`.
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
# Settings that depend on the kind, unless the command sets them.
_BY_KIND = ("grad_sync", "reshard_after_forward")


def _resolve_with(
    strategy: Strategy, changes: FieldChanges, cluster: ClusterSpec, job: Job
) -> Strategy | None:
    """A strategy with changes, resolved for a cluster and job; None if that is not possible."""
    try:
        changed = strategy.but(**changes).resolve(cluster.devices, cluster.devices_per_node)
        return job.split(changed)
    except SpecError:
        return None


def _as_stack_runs(typed: _Attempt, space: Space) -> Iterator[_Attempt]:
    """The change with the strategy as a stack runs it; nothing if the stack cannot run it."""
    try:
        yield typed._replace(strategy=space.applied(typed.strategy))
    except SpecError:
        return


def _quote(text: str) -> str:
    """The text in double quotes if it contains a space."""
    return f'"{text}"' if " " in text else text


def _options_between(
    base: Strategy, wanted: Strategy, cluster: ClusterSpec, job: Job
) -> _Attempt | None:
    """All options that turn a command with the strategy `base` into one with `wanted`.

    None if options cannot express the change.
    """
    moved = base.devices != wanted.devices
    options = [f"--cluster {cluster}"] if moved else []
    start, explicit = base, set()
    if moved or base.shorthand != wanted.shorthand:
        options.append(f"--strategy {_quote(wanted.shorthand)}")
        usual = _resolve_with(
            base.as_kind(base.shorthand), {"replicate": base.replicate}, cluster, job
        )
        explicit = {n for n in _BY_KIND if usual and getattr(base, n) != getattr(usual, n)}
        try:
            start = base.as_kind(wanted.shorthand)
        except SpecError:
            return None
    before = _resolve_with(start, {}, cluster, job)
    if before is None or any(getattr(before, n) and not getattr(wanted, n) for n in _FLAGS):
        return None
    fields: FieldChanges = {}
    for name, option in _OPTIONS.items():
        value = getattr(wanted, name)
        if value == getattr(before, name) and name not in explicit:
            continue
        if name == "accumulate" and job.global_batch is not None:
            continue  # follows from the global batch
        fields[name] = value
        text = str(value).lower() if isinstance(value, bool) else f"{value}"
        if name == "offload":
            options.append(offload_option(wanted.offload))
        else:
            options.append(option if name in _FLAGS else f"{option} {text}")
    after = _resolve_with(start, fields, cluster, job)
    return _Attempt(" ".join(options), after) if after is not None else None


def _with_verdict(
    wanted: Verdict, units: Units, tried: Iterable[_Attempt], cluster: ClusterSpec, job: Job
) -> list[Change]:
    """The changes whose memory verdict is `wanted`, in their order."""
    ways = list(tried)
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, (_, strategy) in enumerate(ways):
        alike.setdefault(units.key(strategy), []).append(index)
    found: dict[int, Change] = {}
    for indices in alike.values():
        strategies = [ways[index].strategy for index in indices]
        columns = Configurations.of(strategies)
        memory = predict_memory(units.of(strategies[0]), columns, job.optimizer)
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


def _candidates(
    strategy: Strategy, cluster: ClusterSpec, losses: tuple[Loss, ...]
) -> Iterator[FieldChanges]:
    """Field changes to try: one change first, then two, then three, then with offload."""
    loss: list[FieldChanges] = [{"loss": loss} for loss in losses if strategy.loss == "plain"]
    recompute: list[FieldChanges] = [{"recompute": "full"}] if strategy.recompute != "full" else []
    batch: list[FieldChanges] = []
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
        kind: FieldChanges = {} if strategy.sharded else {"kind": "zero3", **_UNSET}
        # In the order of what they cost.
        ways: list[FieldChanges] = [{"offload": "optimizer"}, {**kind, "offload": True}]
        for offload in ways:
            yield offload
            yield from (offload | r for r in (*loss, *recompute))
            yield from (offload | b | r for b in batch[-1:] for r in recompute)
            yield from (offload | x | r for x in loss for r in recompute)


def _shardings(strategy: Strategy, cluster: ClusterSpec) -> Iterator[FieldChanges]:
    """Field changes to ZeRO-3 over all devices, then over smaller groups, which pad less."""
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
    """Larger clusters and `strategy` as ZeRO-3 on them, in steps of a third to a half.

    A single node is filled first.
    """
    own = cluster.devices_per_node
    per_node = max(own, cluster.device.node_size) if cluster.nodes == 1 else own
    doubled = cluster.devices * 2
    while doubled <= MOST_DEVICES:
        for count in (doubled, doubled * 3 // 2):
            size = min(per_node, count)
            if count % size == 0:
                larger = cluster.but(nodes=count // size, devices_per_node=size)
                resolved = _resolve_with(strategy, {"kind": "zero3", **_UNSET}, larger, job)
                if resolved is not None:
                    yield larger, resolved
        doubled *= 2
