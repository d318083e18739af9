"""The rule by which ranks divide a tensor, against torch.chunk and against counting ranks."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from shardwise.checkpoint.format.layout import Layout, ListedTensor, assign_writers  # noqa: E402
from shardwise.checkpoint.format.pieces import Tensor  # noqa: E402
from shardwise.checkpoint.format.sharding import (  # noqa: E402
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
from tests.examples import examples  # noqa: E402


@st.composite
def divided(draw: Any) -> tuple[Axes, tuple[int, ...], int]:
    """Axes of a mesh, of which some divide a tensor in any order; its shape; all ranks."""
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    strides = itertools.accumulate(sizes, int.__mul__, initial=1)
    axes = [
        Axis(draw(st.integers(0, len(shape) - 1)), size, stride)
        for size, stride in zip(sizes, strides, strict=False)
    ]
    dividing = draw(st.permutations(axes))[: draw(st.integers(0, 3))]
    return tuple(dividing), shape, math.prod(sizes)


def elements(axes: Axes, shape: tuple[int, ...], rank: int) -> set[int]:
    """The elements that a rank has, by torch.chunk."""
    part = torch.arange(math.prod(shape)).reshape(shape)
    for dim, size, stride in axes:
        chunks = part.chunk(size, dim)
        position = rank // stride % size
        part = chunks[position] if position < len(chunks) else part.narrow(dim, 0, 0)
    return set(part.flatten().tolist())


def inside(box: Box, shape: tuple[int, ...]) -> set[int]:
    full = torch.arange(math.prod(shape)).reshape(shape)
    for dim, (offset, size) in enumerate(zip(*box, strict=True)):
        full = full.narrow(dim, offset, size)
    return set(full.flatten().tolist())


@examples(200)
@given(divided())
def test_shards_are_those_of_torch_and_replicas_are_numbered(
    case: tuple[Axes, tuple[int, ...], int],
) -> None:
    axes, shape, world = case
    assert division_problem(axes, len(shape), world) == ""
    numbers: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for rank in range(world):
        assert inside(shard_of(axes, shape, rank), shape) == elements(axes, shape, rank)
        positions = tuple(rank // axis.stride % axis.size for axis in axes)
        numbers[positions].append(replica_of(axes, rank))
    for found in numbers.values():
        assert found == list(range(replicas(axes, world)))


@examples(200)
@given(divided(), st.data())
def test_the_ranks_over_a_box_are_those_that_have_some_of_it(
    case: tuple[Axes, tuple[int, ...], int], data: Any
) -> None:
    axes, shape, world = case
    if 0 in shape:
        return
    offsets = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    sizes = tuple(data.draw(st.integers(1, n - o)) for n, o in zip(shape, offsets, strict=True))
    box, replica = Box(offsets, sizes), data.draw(st.integers(0, replicas(axes, world) - 1))
    expected = [
        rank
        for rank in range(world)
        if replica_of(axes, rank) == replica and elements(axes, shape, rank) & inside(box, shape)
    ]
    assert sorted(ranks_over(axes, shape, box, replica)) == expected


@examples(100)
@given(st.lists(divided(), min_size=1, max_size=4))
def test_all_ranks_together_write_every_element_once(
    cases: list[tuple[Axes, tuple[int, ...], int]],
) -> None:
    world = math.lcm(*(world for _, _, world in cases))
    tensors = [
        (Tensor(f"t{number}", "float32", shape), axes)
        for number, (axes, shape, _) in enumerate(cases)
    ]
    layout = Layout(assign_writers(tensors, world))
    written: dict[str, list[int]] = defaultdict(list)
    for rank in range(world):
        for part in layout.parts_of(rank):
            shape = layout.tensors[part.tensor].shape
            written[part.tensor] += inside(Box(part.offsets, part.sizes), shape)
    for tensor, _ in tensors:
        assert sorted(written[tensor.name]) == list(range(tensor.numel))


def test_replicas_share_the_bytes_and_each_writes_what_follows_the_other() -> None:
    """Forty tensors of a MiB on four replicas of two shards: ten each."""
    axes = (Axis(0, 2, 1),)
    tensors = [(Tensor(f"t{n:02}", "float32", (512, 1024)), axes) for n in range(40)]
    layout = Layout(assign_writers(tensors, 8))
    for rank in range(8):
        names = [part.tensor for part in layout.parts_of(rank)]
        begin = rank // 2 * 10
        assert names == [f"t{n:02}" for n in range(begin, begin + 10)]


def test_numbers_that_all_ranks_have_are_in_one_file() -> None:
    """Else each rank would open hundreds of files for a few bytes."""
    counts = [(Tensor(f"step {n}", "float32", ()), ()) for n in range(700)]
    layout = Layout(assign_writers(counts, 1000))
    assert (
        layout.ranks_over("step 0", full_box(()))
        == layout.ranks_over("step 699", full_box(()))
        == [0]
    )
    assert len(layout.parts_of(0)) == 700


def test_files_begin_with_the_widest_numbers() -> None:
    """Each tensor is then aligned; those of one rank are among them."""
    tensors = [
        (Tensor("bytes", "uint8", (3,)), ()),
        (Tensor("halves", "bfloat16", (3,)), ()),
        (Tensor("floats", "float32", (3,)), ()),
    ]
    listed = ListedTensor(Tensor("odd", "float64", (2,)), ((0, Box((0,), (2,))),))
    own = [Tensor("rank.0.mark", "int64", (1,)), Tensor("rank.0.none", "int64", (0,))]
    parts = Layout(assign_writers(tensors, 1), [listed]).parts_of(0, own)
    assert [part.tensor for part in parts] == ["odd", "rank.0.mark", "floats", "halves", "bytes"]


@pytest.mark.parametrize(
    ("axes", "dims", "world"),
    [
        ((Axis(1, 2, 1),), 1, 2),  # a dimension too many
        ((Axis(0, 2, 1), Axis(0, 2, 1)), 1, 4),  # the same ranks twice
        ((Axis(0, 4, 1), Axis(0, 2, 2)), 1, 8),  # strides that overlap
        ((Axis(0, 3, 1),), 1, 4),  # three does not divide four
        ((Axis(0, 2, 0),), 1, 2),
        ((Axis(0, 0, 1),), 1, 2),
    ],
)
def test_axes_that_no_ranks_form_are_refused(axes: Axes, dims: int, world: int) -> None:
    assert division_problem(axes, dims, world) != ""
