"""Plan a save without gathering: the shards that a rank writes follow from its number.

torch's own planner gathers the plans of all ranks on rank 0, which then needs minutes at thousands
of ranks. Here every rank computes the layout of all, and one all-reduce shows whether they agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.tensor import DTensor, Placement, Shard

from shardwise.checkpoint.dcp.rank_shards import box_of, shards_of
from shardwise.checkpoint.format.checksum import crc32
from shardwise.checkpoint.format.layout import Layout, ListedTensor, assign_writers
from shardwise.checkpoint.format.pieces import Tensor
from shardwise.checkpoint.format.sharding import Axes, Axis, Box, division_problem, shard_of
from shardwise.engine.rank_tree import RankTree


class UnequalStateError(Exception):
    """Ranks hold different tensors, so that no rank can compute the files of the others."""


class LocalShard(NamedTuple):
    """The shard of a tensor that this rank holds.

    `axes` is the rule by which all ranks divide the tensor; None if this shard does not follow it.
    `item` is torch's entry for writing the shard; None if the rank holds nothing of the tensor.
    """

    tensor: Tensor
    box: Box
    axes: Axes | None
    item: WriteItem | None


class Plan(NamedTuple):
    """The layout that all ranks write, and what this rank writes.

    `own` are tensors of this rank alone; `items` are in the order of its file.
    """

    layout: Layout
    own: list[Tensor]
    items: list[WriteItem]


def local_shards(state: Mapping[str, torch.Tensor], rank: int, world: int) -> dict[str, LocalShard]:
    """The shard of each tensor that this rank holds, by name, as torch's planner divides it."""
    for name, tensor in state.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is not a tensor; only tensors can be saved")
    # Reading the ranks of a large mesh takes longest, and models have few meshes.
    known: dict[tuple[int, tuple[Placement, ...]], Axes] = {}
    found = {}
    for name, item in shards_of(state):
        tensor = state[name]
        axes: Axes = ()
        if isinstance(tensor, DTensor):
            key = (id(tensor.device_mesh), tensor.placements)
            if key not in known:
                known[key] = _axes(tensor)
            axes = known[key]
        found[name] = _local_shard(name, tensor, axes, item, rank, world)
    return found


def _local_shard(
    name: str, tensor: torch.Tensor, axes: Axes, item: WriteItem | None, rank: int, world: int
) -> LocalShard:
    """The shard of one tensor; `axes` are None unless the rule gives the same shard as torch."""
    shape = tuple(tensor.shape)
    box = box_of(item) or Box((0,) * len(shape), (0,) * len(shape))
    is_regular = not division_problem(axes, len(shape), world) and _same_box(
        shard_of(axes, shape, rank), box
    )
    about = Tensor(name, str(tensor.dtype).removeprefix("torch."), shape)
    if item is not None:
        item = WriteItem(
            MetadataIndex(name, item.index.offset), item.type, item.bytes_io_data, item.tensor_data
        )
    return LocalShard(about, box, axes if is_regular else None, item)


def _axes(tensor: DTensor) -> Axes:
    """The rule by which a mesh divides a tensor if its ranks are evenly spaced.

    After tensor parallelism, `fully_shard` divides with a placement of its own, which is not a
    Shard: it divides last, although its axis comes first in the mesh.
    """
    ranks = tensor.device_mesh.mesh
    first: list[Axis] = []
    last: list[Axis] = []
    for number, (size, placement) in enumerate(zip(ranks.shape, tensor.placements, strict=True)):
        if placement.is_replicate() or size == 1:
            continue
        row = ranks[tuple(slice(None) if one == number else 0 for one in range(ranks.ndim))]
        axis = Axis(int(getattr(placement, "dim", -1)), int(size), int(row[1] - row[0]))
        if isinstance(placement, Shard):
            first.append(axis)
        else:
            last.insert(0, axis)
    return (*first, *last)


def _same_box(one: Box, other: Box) -> bool:
    """Whether two boxes are equal or both empty; the offsets of an empty box have no meaning."""
    return one == other or (not math.prod(one.sizes) and not math.prod(other.sizes))


def make_plan(
    shards: Mapping[str, LocalShard], own: Mapping[str, torch.Tensor], tree: RankTree
) -> Plan:
    """Agree on a layout and plan what each rank writes. All ranks call this.

    `shards` are of tensors that all ranks hold, `own` are tensors of this rank alone. Raises
    UnequalStateError on all ranks if they hold different tensors.
    """
    tensors = [shard.tensor for shard in shards.values()]
    irregular = [name for name, shard in shards.items() if shard.axes is None]
    digests = [_digest(tensors), _digest([shard.axes for shard in shards.values()])]
    # Digests are equal on all ranks if the largest equals the smallest.
    values = torch.tensor([*digests, *(-one for one in digests), len(irregular)])
    tree.all_reduce(values, dist.ReduceOp.MAX)
    largest, smallest, irregular_count = values[:2], -values[2:4], int(values[4])
    if largest[0] != smallest[0]:
        raise UnequalStateError("ranks hold different tensors; give all ranks the same model")
    listed: list[ListedTensor] = []
    if irregular_count or largest[1] != smallest[1]:
        irregular = _names_without_rule(shards, tree)
        listed = _listed_tensors([shards[name] for name in irregular], tree)
    unlisted = shards.keys() - set(irregular)
    ruled = [
        (s.tensor, s.axes) for name, s in shards.items() if name in unlisted and s.axes is not None
    ]
    layout = Layout(assign_writers(ruled, tree.size), listed)
    return _plan(layout, shards, own, tree.rank)


def _plan(
    layout: Layout,
    shards: Mapping[str, LocalShard],
    own: Mapping[str, torch.Tensor],
    rank: int,
) -> Plan:
    """The plan of a rank: what it writes of the layout and of its `own` tensors."""
    alone = local_shards(own, 0, 1)
    tensors = [shard.tensor for shard in alone.values()]
    held = {**shards, **alone}
    parts = layout.parts_of(rank, tensors)
    items = [held[part.tensor].item for part in parts]
    return Plan(layout, tensors, [item for item in items if item is not None])


def _digest(values: Sequence[object]) -> int:
    """CRC32 of the text of values, to compare them across ranks."""
    return crc32(repr(values).encode())


def _names_without_rule(shards: Mapping[str, LocalShard], tree: RankTree) -> list[str]:
    """Names of tensors for which some ranks have no rule, or different rules."""
    digests = [-1 if one.axes is None else _digest(one.axes) for one in shards.values()]
    values = torch.tensor([digests, [-one for one in digests]])
    tree.all_reduce(values, dist.ReduceOp.MAX)
    return [
        name
        for name, most, least in zip(shards, values[0].tolist(), (-values[1]).tolist(), strict=True)
        if most != least or most < 0
    ]


def _listed_tensors(shards: Sequence[LocalShard], tree: RankTree) -> list[ListedTensor]:
    """The pieces on all ranks of each tensor without a rule; equal pieces appear once.

    Of equal pieces, the rank with the lowest number writes its own.
    """
    widths = [2 * len(shard.tensor.shape) for shard in shards]
    table = torch.zeros(tree.size, sum(widths), dtype=torch.int64)
    table[tree.rank] = torch.tensor([n for shard in shards for half in shard.box for n in half])
    tree.all_reduce(table)
    found = []
    for shard, columns in zip(shards, torch.split(table, widths, dim=1), strict=True):
        first: dict[Box, int] = {}
        for rank, row in enumerate(columns.tolist()):
            half = len(row) // 2
            box = Box(tuple(row[:half]), tuple(row[half:]))
            if math.prod(box.sizes):
                first.setdefault(box, rank)
        pieces = tuple((rank, box) for box, rank in first.items())
        found.append(ListedTensor(shard.tensor, pieces))
    return found


class ShardPlanner(DefaultSavePlanner):
    """Planner that gives torch the plan of this rank, and no plan of other ranks."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._items = plan.items

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan(self._items)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        return all_plans, Metadata({})
