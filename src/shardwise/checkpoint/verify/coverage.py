"""Check that pieces cover a tensor: every element is in exactly one."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from shardwise.checkpoint.format.pieces import CheckpointContent, Piece, Tensor

# Every divided axis doubles the corners; meshes have at most three dimensions.
_MOST_AXES = 8
_OVERLAP_AND_GAPS = "pieces overlap and leave gaps"


def problems_of(saved: CheckpointContent) -> Iterator[tuple[str, str]]:
    """Yield the name of each tensor that its pieces do not cover exactly, and the problem."""
    by_tensor: dict[str, list[Piece]] = {name: [] for name in saved.tensors}
    for piece in saved.pieces:
        if piece.tensor in by_tensor:
            by_tensor[piece.tensor].append(piece)
        else:
            yield piece.tensor, "has a piece but is not a tensor of the checkpoint"
    for name, pieces in by_tensor.items():
        if why := coverage_problem(saved.tensors[name], pieces):
            yield name, why


def coverage_problem(tensor: Tensor, pieces: Sequence[Piece]) -> str:
    """Why pieces do not cover a tensor exactly; empty if they do."""
    shape, rank = tensor.shape, len(tensor.shape)
    if len(pieces) == 1 and pieces[0].sizes == shape and not any(pieces[0].offsets):
        return "" if len(pieces[0].offsets) == rank else "a piece has no valid offset"
    held = 0
    for _, offsets, sizes, *_ in pieces:
        if len(offsets) != rank or len(sizes) != rank:
            return f"a piece has {len(sizes)} dimensions, the tensor has {rank}"
        if any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
            return f"the piece at {list(offsets)} of size {list(sizes)} exceeds {list(shape)}"
        held += math.prod(sizes)
    if held > tensor.numel:
        return "pieces overlap"
    if held < tensor.numel:
        return f"{tensor.numel - held:,} of {tensor.numel:,} elements are in no piece"
    return _tiling_problem(tensor, pieces) if held else ""


def _tiling_problem(tensor: Tensor, pieces: Sequence[Piece]) -> str:
    """Why pieces that have as many elements as their tensor do not cover it; empty if they do.

    Compares corners: those of all pieces must cancel except those of the full tensor. How often
    each element is covered is a function of its position, and the signed corners of a box are the
    differences of that function along every axis. Equal differences mean equal functions.
    """
    axes = [a for a, n in enumerate(tensor.shape) if any(piece.sizes[a] != n for piece in pieces)]
    if len(axes) > _MOST_AXES:
        return f"is divided along {len(axes)} axes, at most {_MOST_AXES} can be checked"
    boxes = [(piece.offsets, piece.sizes, 1) for piece in pieces if 0 not in piece.sizes]
    if len(axes) == 1:
        # The common case: pieces in a row along one axis.
        at, axis = 0, axes[0]
        for begin, size in sorted((offsets[axis], sizes[axis]) for offsets, sizes, _ in boxes):
            if begin != at:
                return _OVERLAP_AND_GAPS
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
    return _OVERLAP_AND_GAPS if corners else ""
