"""Whether pieces fill a tensor: every element is in exactly one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from shardwise.checkpoint.format.pieces import Piece, Saved, Tensor

# Every axis that is cut doubles the corners. Meshes have three dimensions at most.
_MOST_AXES = 8
_BOTH = "pieces overlap, and leave elements out"


def problems_of(saved: Saved) -> Iterator[tuple[str, str]]:
    """Name of each tensor that its pieces do not fill exactly once, and what is wrong."""
    by_tensor: dict[str, list[Piece]] = {name: [] for name in saved.tensors}
    for piece in saved.pieces:
        if piece.tensor in by_tensor:
            by_tensor[piece.tensor].append(piece)
        else:
            yield piece.tensor, "a piece of a tensor that is none"
    for name, pieces in by_tensor.items():
        if why := uncovered(saved.tensors[name], pieces):
            yield name, why


def uncovered(tensor: Tensor, pieces: Sequence[Piece]) -> str:
    """What is wrong with how a tensor was cut, in a few words; empty where nothing is."""
    shape, rank = tensor.shape, len(tensor.shape)
    if len(pieces) == 1 and pieces[0].sizes == shape and not any(pieces[0].offsets):
        return "" if len(pieces[0].offsets) == rank else "a piece at no place of it"
    held = 0
    for _, offsets, sizes, *_ in pieces:
        if len(offsets) != rank or len(sizes) != rank:
            return f"a piece of {len(sizes)} dimensions where it has {rank}"
        if any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            return f"the piece at {list(offsets)} of {list(sizes)} lies outside of {list(shape)}"
        held += math.prod(sizes)
    if held > tensor.numel:
        return "pieces overlap"
    if held < tensor.numel:
        return f"{tensor.numel - held:,} of {tensor.numel:,} elements are in no piece"
    return _untiled(tensor, pieces) if held else ""


def _untiled(tensor: Tensor, pieces: Sequence[Piece]) -> str:
    """Whether boxes are the whole, by their corners alone.

    How often each element is held is a function of its place, and the signed corners of a box are
    its differences along every axis. Functions are equal where their differences are: the corners
    of all pieces must cancel but for those of the whole.
    """
    axes = [a for a, n in enumerate(tensor.shape) if any(piece.sizes[a] != n for piece in pieces)]
    if len(axes) > _MOST_AXES:
        return f"is cut along {len(axes)} axes, more than can be checked"
    boxes = [(piece.offsets, piece.sizes, 1) for piece in pieces if 0 not in piece.sizes]
    if len(axes) == 1:
        # Nearly always: one behind the other.
        at, axis = 0, axes[0]
        for begin, size in sorted((offsets[axis], sizes[axis]) for offsets, sizes, _ in boxes):
            if begin != at:
                return _BOTH
            at += size
        return ""
    signs = [math.prod(each) for each in itertools.product((1, -1), repeat=len(axes))]
    corners: dict[tuple[int, ...], int] = {}
    for offsets, sizes, count in [*boxes, ((0,) * len(tensor.shape), tensor.shape, -1)]:
        ends = [(offsets[a], offsets[a] + sizes[a]) for a in axes]
        for place, sign in zip(itertools.product(*ends), signs, strict=True):
            value = corners.get(place, 0) + count * sign
            if value:
                corners[place] = value
            else:
                del corners[place]
    return _BOTH if corners else ""
