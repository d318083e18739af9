"""How ranks divide a tensor, as a rule: the shard of any rank follows from its number.

A mesh orders ranks along axes. Along an axis of `size` ranks that are `stride` apart, a rank is
at position `rank // stride % size`. Ranks at equal positions of all axes that divide a tensor have
equal shards: they are its replicas.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class Axis(NamedTuple):
    """Divides dimension `dim` of a tensor into `size` parts, as torch.chunk does."""

    dim: int
    size: int
    stride: int


# In the order in which they divide: a later axis divides the parts of earlier axes.
Axes = tuple[Axis, ...]


# Pairs of an axis, by its number, and the position along it.
_Positions = tuple[tuple[int, int], ...]


class Box(NamedTuple):
    """A rectangular part of a tensor; offsets and sizes are in elements."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    def overlaps(self, other: Box) -> bool:
        pairs = zip(*self, *other, strict=True)
        return all(a < b + m and b < a + n for a, n, b, m in pairs)


def full_box(shape: Sequence[int]) -> Box:
    """The box of a full tensor."""
    return Box((0,) * len(shape), tuple(shape))


def shard_of(axes: Axes, shape: Sequence[int], rank: int) -> Box:
    """The shard of a rank; one of its sizes is 0 if the rank has none."""
    offsets, sizes = [0] * len(shape), list(shape)
    for dim, size, stride in axes:
        each = -(-sizes[dim] // size)
        begin = min(rank // stride % size * each, sizes[dim])
        offsets[dim] += begin
        sizes[dim] = min(each, sizes[dim] - begin)
    return Box(tuple(offsets), tuple(sizes))


def division_problem(axes: Axes, dims: int, world: int) -> str:
    """Why axes cannot divide a tensor of `dims` dimensions on `world` ranks; empty if they can."""
    if any(not 0 <= dim < dims for dim, _, _ in axes):
        return f"divides a dimension beyond the {dims} of a tensor"
    inner = 1
    for _, size, stride in sorted(axes, key=lambda axis: (axis.stride, axis.size)):
        if size < 1 or stride < 1 or stride % inner:
            return "has axes that overlap"
        inner = stride * size
    return "" if world % inner == 0 else f"has axes that {world} ranks cannot form"


def replicas(axes: Axes, world: int) -> int:
    """Number of ranks that have the same shard."""
    for _, size, _ in axes:
        world //= size
    return world


def replica_of(axes: Axes, rank: int) -> int:
    """Index of a rank among the ranks with the same shard."""
    for _, size, stride in sorted(axes, key=lambda axis: -axis.stride):
        rank = rank // (stride * size) * stride + rank % stride
    return rank


def ranks_over(axes: Axes, shape: Sequence[int], box: Box, replica: int) -> Iterator[int]:
    """Yield the ranks of a replica whose shards overlap `box`, which is not empty."""
    # Spans (start, length) of each dimension, with the positions along its axes that give them.
    spans: list[list[tuple[_Positions, int, int]]] = [[((), 0, n)] for n in shape]
    for number, (dim, size, _) in enumerate(axes):
        begin, end = box.offsets[dim], box.offsets[dim] + box.sizes[dim]
        spans[dim] = [
            ((*positions, (number, at)), start, length)
            for positions, first, left in spans[dim]
            for at, start, length in _parts(first, left, size, begin, end)
        ]
    inner_first = sorted(range(len(axes)), key=lambda number: axes[number].stride)
    for chosen in itertools.product(*spans):
        at: dict[int, int] = dict(
            itertools.chain.from_iterable(positions for positions, _, _ in chosen)
        )
        rank = replica
        for number in inner_first:
            _, size, stride = axes[number]
            rank = rank // stride * stride * size + at[number] * stride + rank % stride
        yield rank


def _parts(
    first: int, left: int, size: int, begin: int, end: int
) -> Iterator[tuple[int, int, int]]:
    """Position, start and length of the parts of a span that overlap `begin` to `end`.

    The span starts at `first`, has the length `left` and is divided into `size` parts.
    """
    each = -(-left // size)
    for at in range(max(0, begin - first) // each, min(size, -(-(end - first) // each))):
        start = first + at * each
        if start < first + left:
            yield at, start, min(each, first + left - start)
