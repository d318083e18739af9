"""Boxes that fill a tensor, and those that do not."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.checkpoint.format.pieces import CheckpointContent, Piece, Tensor
from shardwise.checkpoint.verify.coverage import problems_of
from tests.examples import examples

Box = tuple[tuple[int, ...], tuple[int, ...]]


def problems(shape: tuple[int, ...], boxes: list[Box]) -> list[tuple[str, str]]:
    pieces = [Piece("w", offsets, sizes, "file", 0, 0) for offsets, sizes in boxes]
    return list(problems_of(CheckpointContent({"w": Tensor("w", "float32", shape)}, pieces, [])))


@st.composite
def cut(draw: Any) -> tuple[tuple[int, ...], list[Box]]:
    """A tensor cut along every axis at any places."""
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    spans = []
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(0, size), max_size=3)) | {0, size})
        spans.append(list(itertools.pairwise(cuts)))
    parts = itertools.product(*spans)
    return shape, [(tuple(a for a, _ in p), tuple(b - a for a, b in p)) for p in parts]


@examples(300)
@given(cut(), st.data())
def test_it_is_what_counting_every_element_finds(
    made: tuple[tuple[int, ...], list[Box]], data: Any
) -> None:
    shape, boxes = made
    # One box moved, dropped, doubled, put in place of another, or grown.
    one, other = (data.draw(st.integers(0, len(boxes) - 1)) for _ in range(2))
    change = data.draw(st.sampled_from(["none", "drop", "double", "replace", "move", "resize"]))
    if change == "drop":
        boxes.pop(one)
    elif change == "double":
        boxes.append(boxes[other])
    elif change == "replace":
        boxes[one] = boxes[other]
    elif change in ("move", "resize"):
        offsets, sizes = (list(numbers) for numbers in boxes[one])
        for axis, size in enumerate(shape):
            offsets[axis] = data.draw(st.integers(0, size))
            if change == "resize":
                sizes[axis] = data.draw(st.integers(0, size - offsets[axis]))
        boxes[one] = (tuple(offsets), tuple(sizes))
    counts = np.zeros([2 * size for size in shape], dtype=int)
    for corner, extent in boxes:
        counts[tuple(slice(o, o + s) for o, s in zip(corner, extent, strict=True))] += 1
    expected = np.zeros_like(counts)
    expected[tuple(slice(size) for size in shape)] = 1
    assert (problems(shape, boxes) == []) == bool((counts == expected).all())


@pytest.mark.parametrize(
    ("boxes", "why"),
    [
        ([], "10 of 10 elements"),
        ([((0,), (5,))], "5 of 10 elements"),
        ([((0,), (10,)), ((4,), (2,))], "overlap"),
        ([((0,), (5,)), ((4,), (5,))], "overlap"),
        ([((5,), (10,))], "exceeds"),
        ([((0, 0), (10, 1))], "2 dimensions"),
        ([((0, 0), (10,))], "offset"),
    ],
)
def test_what_is_wrong_is_said(boxes: list[Box], why: str) -> None:
    [(name, told)] = problems((10,), boxes)
    assert name == "w"
    assert why in told


def test_empty_tensors_and_empty_pieces_are_fine() -> None:
    assert problems((0, 4), []) == []
    assert problems((0, 4), [((0, 0), (0, 4))]) == []
    assert problems((3,), [((0,), (3,)), ((3,), (0,)), ((3,), (0,))]) == []
    assert problems((), [((), ())]) == []
    assert problems((), []) != []


def test_a_piece_of_nothing_is_told() -> None:
    pieces = [Piece("ghost", (0,), (1,), "file", 0, 4)]
    assert [name for name, _ in problems_of(CheckpointContent({}, pieces, []))] == ["ghost"]


def test_boxes_of_many_axes_end_in_time() -> None:
    """Each axis doubles the corners of a box: sixty would never end."""
    [(_, why)] = problems((2,) * 60, [((0,) * 60, (1,) * 60)] * 8)
    assert "elements are in no piece" in why
    # As many elements as the whole has, all of them the same.
    [(_, why)] = problems((2,) * 10, [((0,) * 10, (1,) * 10)] * 2**10)
    assert "10 axes" in why


@pytest.mark.timing
@pytest.mark.parametrize("shape", [(1_000_000,), (1000, 1000)])
def test_a_million_pieces_take_seconds(shape: tuple[int, ...]) -> None:
    places = itertools.product(*(range(size) for size in shape))
    boxes = [(place, (1,) * len(shape)) for place in places]
    begin = time.monotonic()
    assert problems(shape, boxes) == []
    assert time.monotonic() - begin < 30
    boxes[7] = boxes[8]
    assert problems(shape, boxes) != []
