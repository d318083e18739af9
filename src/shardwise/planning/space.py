"""The search space of a plan: the values of each setting, and the placements of states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from shardwise.planning.batches import BATCH_TOLERANCE
from shardwise.planning.layout import UNDIVIDED, Degrees
from shardwise.planning.placed import Forms, Place, Placed
from shardwise.predict.fit import Parallelism
from shardwise.spec.adapter import Adapter
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.mesh import Mesh
from shardwise.spec.optimizer import Optimizer
from shardwise.spec.optimizer_sharding import is_trained_with
from shardwise.spec.record import SpecError
from shardwise.spec.states import offloaded_parts
from shardwise.spec.strategy import Loss, Strategy

Recompute = str | float
RECOMPUTE: tuple[Recompute, ...] = (
    *("none", "selective"),
    *(0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875),
    "full",
)


def _same_adapter(adapter: Adapter) -> Adapter:
    return adapter


def _same_strategy(strategy: Strategy) -> Strategy:
    return strategy


# The losses to try for another stack, of which it has some.
STACK_LOSSES: tuple[Loss, ...] = ("plain", "chunked", "fused")


class Space(NamedTuple):
    """The values of each setting that a search tries; kinds and degrees follow from the cluster."""

    recompute: tuple[Recompute, ...] = RECOMPUTE
    # None tries every micro-batch.
    micro_batches: tuple[int, ...] | None = None
    # How far a step may be from the global batch, as a share; 0 for exactly that batch.
    batch_tolerance: float = BATCH_TOLERANCE
    prefetch: tuple[int, ...] = (0, 1, 2)
    forward_prefetch: tuple[int, ...] = (0, 1)
    blocks_per_unit: tuple[int, ...] = (1, 2, 4)
    # All but the first are tried only if logits take a noticeable part of the memory. A fused loss,
    # which needs a package, is tried for stacks only; a chunked one has the same peak.
    losses: tuple[Loss, ...] = ("plain", "chunked")
    # Dtypes to reduce gradients in; empty for the base's. Others change the arithmetic.
    reduce_dtypes: tuple[str, ...] = ()
    # What every configuration keeps in host memory, as `Strategy.offload`.
    offload: bool | str = False
    # Whether a resolved strategy may be chosen. A stack refuses strategies that it cannot express;
    # this does not depend on the micro-batch. None allows all.
    allowed: Callable[[Strategy], bool] | None = None
    # Maps a resolved strategy to the strategy that the stack runs, which is what is searched.
    applied: Callable[[Strategy], Strategy] = _same_strategy
    # Whether the stack has an optimizer. None allows all.
    has_optimizer: Callable[[Optimizer], bool] | None = None
    # Whether an optimizer can train with a strategy; by default in shardwise's own trainer.
    trains: Callable[[Optimizer, Strategy], bool] = is_trained_with
    # Gives the base strategy and the space of the same search with an adapter; None if the stack
    # cannot express the adapter. Without this function both stay as they are.
    adapted: Callable[[Adapter], tuple[Strategy, Space] | None] | None = None
    # An adapter with frozen weights as the stack stores them.
    stored: Callable[[Adapter], Adapter] = _same_adapter

    # Kinds of parallelism that the stack has but the search does not try.
    leaves_out: tuple[Parallelism, ...] = ()
    # Degrees of tensor, context and expert parallelism; None tries all that divide model and
    # cluster.
    tensor: tuple[int, ...] | None = None
    context: tuple[int, ...] | None = None
    expert: tuple[int, ...] | None = None
    # Whether to try only the degrees with the most devices per sequence.
    most_divided: bool = False

    def divides(self, tensor: int, context: int, expert: int = 1) -> bool:
        """Whether these degrees are among those to try."""
        given = ((self.tensor, tensor), (self.context, context), (self.expert, expert))
        return all(wanted is None or degree in wanted for wanted, degree in given)

    def allows(self, strategy: Strategy) -> bool:
        return self.allowed is None or self.allowed(strategy)

    @property
    def for_stack(self) -> bool:
        """Whether the search is for another stack, which may change strategies."""
        return self.applied is not _same_strategy

    def offloading(self, offload: bool | str) -> Space:
        """The space with parts in host memory, without recompute policies that exclude this."""
        policies = self.recompute
        if "activations" in offloaded_parts(offload):
            policies = tuple(p for p in policies if p != "selective") or policies
        return self._replace(offload=offload, recompute=policies)

    def quick(self) -> Space:
        """The space without the settings of the last pass, which gain only a few percent."""
        return self._replace(
            prefetch=self.prefetch[:1] if 1 not in self.prefetch else (1,),
            forward_prefetch=self.forward_prefetch[:1] if 0 not in self.forward_prefetch else (0,),
            blocks_per_unit=self.blocks_per_unit[:1] if 1 not in self.blocks_per_unit else (1,),
        )

    def coarse(self) -> Space:
        """A reduced space to compare cluster sizes: few shares of recomputation, usual settings."""
        few = tuple(p for p in self.recompute if p in ("none", "selective", 0.5, "full"))
        return self.quick()._replace(recompute=few or self.recompute)

    def least_memory(self) -> Space:
        """The space reduced to the settings that need the least memory."""
        return self._replace(
            recompute=tuple(p for p in self.recompute if p == "full") or self.recompute,
            micro_batches=(1,),
            prefetch=tuple(count for count in self.prefetch if count <= 1) or self.prefetch,
            blocks_per_unit=self.blocks_per_unit[:1],
        )


def placements(
    cluster: ClusterSpec,
    base: Strategy,
    accumulates: bool,
    space: Space | None = None,
    *,
    split_root: bool = False,
    degrees: Degrees = UNDIVIDED,
    forms: Forms | None = None,
) -> Placed:
    """Resolved strategies for every way to place the model states, the simplest first.

    `base` gives what a plan does not choose: dtypes and compilation. Other settings have their
    usual value, or the first of the space if that is not in the space. `space.applied` may change
    strategies into those that a stack runs. With `split_root`, embedding and head of sharded
    strategies are separate units. With tensor or context parallelism, each device of `cluster`
    stands for a group of devices. `forms` keeps what was checked, for further calls with the same
    settings but `degrees`.
    """
    space = space or Space()
    usual = {**_UNSET, **_usual(space), "split_root": split_root, **degrees.fields}
    devices = cluster.devices * degrees.inner

    def resolved(fields: dict[str, object]) -> Strategy | None:
        try:
            strategy = base.but(**{**usual, **fields})
            return space.applied(strategy.resolve(devices, devices))
        except SpecError:
            return None

    every = _fields(cluster, accumulates, degrees)
    if space.for_stack:
        made = dict.fromkeys(one for fields in every if (one := resolved(fields)))
        # A stack without expert parallelism runs the same without it.
        return Placed.of(one for one in made if one.expert == degrees.expert)
    forms = forms or Forms()
    # Different fields may resolve to the same form and degrees.
    found: dict[tuple[int, Place], None] = {}
    for fields in every:
        place = _resolved_place(fields, cluster.devices, degrees)
        if place is None:
            continue
        form = forms.index(_form_key(fields, place, degrees), partial(resolved, fields))
        if form is not None:
            found.setdefault((form, place))
    used, form_of = np.unique([form for form, _ in found], return_inverse=True)
    used = used.astype(np.int64)
    kept = [forms.strategies[number] for number in used.tolist()]
    settings = forms.columns.take(used)
    return Placed(kept, form_of, [place for _, place in found], settings=settings)


def _form_key(fields: dict[str, object], place: Place, degrees: Degrees) -> tuple[object, ...]:
    """What `Strategy.resolve` and its checks decide all fields but degrees by."""
    several = place.mesh.shard > 1, place.mesh.replicate > 1, degrees.tensor > 1
    inside = degrees.context > 1, degrees.expert > 1, degrees.ring
    return fields["kind"], fields["grad_sync"], place.reshard > 0, *several, *inside


def _usual(space: Space) -> dict[str, object]:
    """The usual values of the settings that are refined later, or the first of the space."""
    first = space.quick()
    return {
        "prefetch": first.prefetch[0],
        "forward_prefetch": first.forward_prefetch[0],
        "blocks_per_unit": first.blocks_per_unit[0],
        "loss": first.losses[0],
    }


def _resolved_place(fields: dict[str, object], devices: int, degrees: Degrees) -> Place | None:
    """The degrees of a placement on so many groups of devices; None if they do not divide it."""
    shard, reshard = fields["shard"] or 1, fields["reshard_after_forward"] or 0
    assert isinstance(shard, int)
    assert isinstance(reshard, int)
    states = shard * degrees.context
    if devices % shard or states % degrees.expert or (reshard and states % reshard):
        return None
    mesh = Mesh(devices // shard, shard, degrees.context, degrees.tensor)
    # Groups as large as that which shares the states are that group itself.
    return Place(mesh, degrees.expert, 0 if reshard == states else reshard)


def offloaded(strategies: Iterable[Strategy], offload: bool | str) -> Iterator[Strategy]:
    """The strategies with parts in host memory, as far as they allow it.

    One device shards over itself where offload needs sharding.
    """
    for strategy in strategies:
        for fields in ({}, _ALONE) if strategy.kind == "single" else ({},):
            try:
                yield strategy.but(**fields, offload=offload).resolve(
                    strategy.devices, strategy.devices
                )
            except SpecError:
                continue
            break


_ALONE: dict[str, object] = {
    "kind": "zero3",
    "shard": None,
    "replicate": None,
    "reshard_after_forward": None,
    "reshard_after_backward": None,
    "grad_sync": None,
}
_UNSET: dict[str, object] = {
    "replicate": None,
    "within_node": False,
    "micro_batch": 1,
    "accumulate": 1,
    "recompute": "none",
    "offload": False,
    "ddp_bucket_mib": None,
    "reshard_after_backward": None,
}
_UNSHARDED: dict[str, object] = {
    "prefetch": 1,
    "forward_prefetch": 0,
    "blocks_per_unit": 1,
    "split_root": False,
}


def _fields(
    cluster: ClusterSpec, accumulates: bool, degrees: Degrees
) -> Iterator[dict[str, object]]:
    """The strategy fields of every placement: kind, sharding degree, reshard and grad sync."""

    def placed(kind: str, shard: int | None = None, **more: object) -> dict[str, object]:
        unset = {"reshard_after_forward": None, "grad_sync": None}
        # Only DDP has hooks that compress.
        plain = {} if kind == "ddp" else {"compress": None}
        return {"kind": kind, "shard": shard, **unset, **plain, **more}

    if cluster.devices == 1 and degrees.inner == 1:
        yield {**placed("single"), **_UNSHARDED}
        return
    if degrees.inner > 1:
        # Each group holds its own copy of the states, sharded over its context group.
        yield placed("zero2", 1)
        yield placed("zero3", 1)
    yield {**placed("ddp"), **_UNSHARDED}
    for shard in group_sizes(cluster):
        if accumulates:
            yield placed("zero1", shard)
        yield placed("zero2", shard)
        yield placed("zero3", shard)
        if accumulates:
            yield placed("zero3", shard, grad_sync="last")
        if accumulates and shard < cluster.devices:
            yield placed("zero3", shard, grad_sync="every")
        # The engine does not combine integer resharding with tensor parallelism.
        if shard > cluster.devices_per_node > 1 and degrees.tensor == 1:
            group = cluster.devices_per_node * degrees.context
            yield placed("zero3", shard, reshard_after_forward=group)


def group_sizes(cluster: ClusterSpec) -> list[int]:
    """Sharding degrees to try, the largest first: all devices, then halves down to two devices."""
    sizes = {cluster.devices}
    nodes = cluster.nodes
    while nodes >= 1:
        if cluster.nodes % nodes == 0:
            sizes.add(nodes * cluster.devices_per_node)
        nodes //= 2
    sizes.add(cluster.devices_per_node)
    part = cluster.devices_per_node
    while part > 1:
        if cluster.devices_per_node % part == 0:
            sizes.add(part)
        part //= 2
    return sorted((size for size in sizes if size > 1), reverse=True)
