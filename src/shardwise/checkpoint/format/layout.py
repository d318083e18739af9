"""The layout of a checkpoint, `layout.json`: its tensors, and the rule by which ranks divide each.

It grows with the number of tensors, not with the number of ranks. A tensor that no rule describes
lists its pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple

import msgspec

from shardwise.checkpoint.format.checksum import BLOCK
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import DTYPES, Part, Tensor
from shardwise.checkpoint.format.sharding import (
    Axes,
    Axis,
    Box,
    division_problem,
    full_box,
    ranks_over,
    replica_of,
    replicas,
    shard_of,
)

NAME = "layout.json"
# Least bytes that a replica writes, so that readers do not open a file for a few numbers.
_LEAST_SHARE = 2**20

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
_Counts = tuple[_Count, ...]
# name, dtype, shape, index of its rule in `axes`, replica that writes it
_RuledEntry = tuple[str, str, _Counts, _Count, _Count]
# name, dtype, shape, pieces: rank, offsets, sizes
_ListedEntry = tuple[str, str, _Counts, list[tuple[_Count, _Counts, _Counts]]]


class _Layout(msgspec.Struct, forbid_unknown_fields=True):
    block: _Count
    # Dimension, size, stride.
    axes: list[tuple[tuple[_Count, _Count, _Count], ...]]
    tensors: list[_RuledEntry]
    listed: list[_ListedEntry]


class RuledTensor(NamedTuple):
    """A tensor that ranks divide by a rule; the ranks of replica `replica` write its shards."""

    tensor: Tensor
    axes: Axes
    replica: int


class ListedTensor(NamedTuple):
    """A tensor that no rule describes: `pieces` has a rank and the part that it writes."""

    tensor: Tensor
    pieces: tuple[tuple[int, Box], ...]


class Layout:
    """All tensors of a checkpoint except those that belong to a single rank."""

    def __init__(self, ruled: Iterable[RuledTensor], listed: Iterable[ListedTensor] = ()) -> None:
        self.ruled = {one.tensor.name: one for one in ruled}
        self.listed = {one.tensor.name: one for one in listed}
        self.tensors = {one.tensor.name: one.tensor for one in self.ruled.values()}
        self.tensors |= {one.tensor.name: one.tensor for one in self.listed.values()}
        # By rule and replica: the tensors that it writes, each with its position among all tensors.
        self._written: dict[Axes, dict[int, list[tuple[int, Tensor]]]] = {}
        for number, (tensor, axes, replica) in enumerate(self.ruled.values()):
            self._written.setdefault(axes, {}).setdefault(replica, []).append((number, tensor))
        # Cache: models have few shapes, and a rank has the same box of all tensors of one shape.
        self._over: dict[tuple[Axes, tuple[int, ...], Box, int], list[int]] = {}

    def ranks_over(self, name: str, box: Box) -> list[int]:
        """Ranks that wrote a piece which overlaps `box` of the tensor `name`."""
        if name in self.ruled:
            tensor, axes, replica = self.ruled[name]
            key = (axes, tensor.shape, box, replica)
            if key not in self._over:
                self._over[key] = list(ranks_over(*key))
            return self._over[key]
        return [rank for rank, piece in self.listed[name].pieces if piece.overlaps(box)]

    def parts_of(self, rank: int, own: Sequence[Tensor] = ()) -> list[Part]:
        """Parts that a rank writes, in the order of its file.

        `own` are tensors of this rank alone.
        """
        parts = [*self._shards(rank), *(_part(one, full_box(one.shape)) for one in own)]
        # Widest dtype first, so that every tensor is aligned to its element size.
        return sorted((part for part in parts if part.length), key=lambda one: -DTYPES[one.dtype])

    def _shards(self, rank: int) -> Iterator[Part]:
        """Parts of the tensors of the layout that a rank writes."""
        found: list[tuple[int, Tensor, Box]] = []
        for axes, by_replica in self._written.items():
            known: dict[tuple[int, ...], Box] = {}
            for number, tensor in by_replica.get(replica_of(axes, rank), ()):
                # Computed once per shape: models have few shapes.
                box = known.get(tensor.shape)
                if box is None:
                    box = known[tensor.shape] = shard_of(axes, tensor.shape, rank)
                found.append((number, tensor, box))
        yield from (_part(tensor, box) for _, tensor, box in sorted(found))
        for one in self.listed.values():
            yield from (_part(one.tensor, box) for writer, box in one.pieces if writer == rank)


def _part(tensor: Tensor, box: Box) -> Part:
    """The part of a tensor that a box covers."""
    return Part(tensor.name, tensor.dtype, *box)


def assign_writers(sharded: Iterable[tuple[Tensor, Axes]], world: int) -> Iterator[RuledTensor]:
    """Choose the replica that writes each tensor, so that all write about as many bytes.

    A replica writes consecutive tensors, so that a reader opens few files.
    """
    sharded = list(sharded)
    total: dict[Axes, int] = {}
    for tensor, axes in sharded:
        total[axes] = total.get(axes, 0) + _largest_shard_bytes(tensor, axes)
    before = dict.fromkeys(total, 0)
    for tensor, axes in sharded:
        share = max(_LEAST_SHARE, -(-total[axes] // replicas(axes, world)))
        yield RuledTensor(tensor, axes, before[axes] // share)
        before[axes] += _largest_shard_bytes(tensor, axes)


def _largest_shard_bytes(tensor: Tensor, axes: Axes) -> int:
    """Bytes of the largest shard, which is that of rank 0; at least 1."""
    # An empty tensor after all others must not begin a share of its own.
    return max(1, math.prod(shard_of(axes, tensor.shape, 0).sizes) * DTYPES[tensor.dtype])


def write_layout(layout: Layout) -> bytes:
    """The layout as the bytes of layout.json."""
    axes = {
        one: number
        for number, one in enumerate(dict.fromkeys(r.axes for r in layout.ruled.values()))
    }
    return msgspec.json.encode(
        _Layout(
            block=BLOCK,
            axes=list(axes),
            tensors=[
                (*tensor, axes[rule], replica) for tensor, rule, replica in layout.ruled.values()
            ],
            listed=[
                (*tensor, [(rank, *box) for rank, box in pieces])
                for tensor, pieces in layout.listed.values()
            ],
        )
    )


def read_layout(data: bytes, world: int) -> Layout:
    """Parse the layout of a checkpoint of `world` ranks; raise UntrustedError if it is invalid."""
    try:
        found = msgspec.json.decode(data, type=_Layout)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise UntrustedError(f"is not a valid layout: {error}"[:200]) from None
    if found.block != BLOCK:
        raise UntrustedError(f"has blocks of {found.block:,} bytes, expected {BLOCK:,}")
    rules = [tuple(Axis(*axis) for axis in axes) for axes in found.axes]
    _check_rules(found, rules, world)
    ruled = [
        RuledTensor(Tensor(name, dtype, shape), rules[number], replica)
        for name, dtype, shape, number, replica in found.tensors
    ]
    listed = [
        ListedTensor(Tensor(name, dtype, shape), tuple((rank, Box(*box)) for rank, *box in pieces))
        for name, dtype, shape, pieces in found.listed
    ]
    layout = Layout(ruled, listed)
    check_tensors([*(one.tensor for one in ruled), *(one.tensor for one in listed)])
    for one in listed:
        if any(rank >= world for rank, _ in one.pieces):
            raise UntrustedError(f"has a piece of {one.tensor.name[:100]!r} of an unknown rank")
    return layout


def _check_rules(found: _Layout, rules: Sequence[Axes], world: int) -> None:
    """Raise UntrustedError for a tensor that its rule cannot divide, or that no rank wrote."""
    # Each pair is checked once: there are thousands of tensors, but few rules and dimensions.
    problems = {
        (number, dims): division_problem(rules[number], dims, world)
        for number, dims in {(one[3], len(one[2])) for one in found.tensors}
        if number < len(rules)
    }
    for name, _, shape, number, replica in found.tensors:
        if number >= len(rules):
            raise UntrustedError(f"divides {name[:100]!r} by an unknown rule")
        if why := problems[number, len(shape)]:
            raise UntrustedError(f"{why}, for {name[:100]!r}")
        if replica >= replicas(rules[number], world):
            raise UntrustedError(f"has {name[:100]!r} of an unknown replica")


def check_tensors(tensors: Sequence[Tensor]) -> None:
    """Raise UntrustedError for an unknown dtype, or a name that occurs twice."""
    names = set()
    for tensor in tensors:
        if tensor.dtype not in DTYPES or tensor.name in names:
            raise UntrustedError(f"lists {tensor.name[:100]!r} twice or with an unknown dtype")
        names.add(tensor.name)
