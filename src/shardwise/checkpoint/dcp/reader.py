"""Storage reader for torch DCP that verifies every block before it reaches a tensor."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from shardwise.checkpoint.dcp.rank_shards import box_of, shards_of
from shardwise.checkpoint.dcp.raw import bytes_of, read_block
from shardwise.checkpoint.format.checksum import BLOCK
from shardwise.checkpoint.format.pieces import DTYPES, Piece
from shardwise.checkpoint.verify.opened import Checkpoint


class CorruptError(Exception):
    """Bytes do not match their checksum; the message names the file and the tensor."""


class CheckpointReader(StorageReader):
    """Reads the shards of `state` that this rank holds, from an opened checkpoint."""

    def __init__(self, checkpoint: Checkpoint, state: Mapping[str, torch.Tensor]) -> None:
        self._checkpoint, self._names = checkpoint, list(state)
        # Torch's planner compares each shard with all chunks: it gets only the chunks it needs.
        self._pieces: dict[tuple[str, tuple[int, ...]], Piece] = {}
        for name, item in shards_of(state):
            saved, box = checkpoint.tensors.get(name), box_of(item)
            # A tensor that is missing or has another shape is left out: torch then raises an error.
            if saved is not None and box is not None and saved.shape == tuple(state[name].shape):
                for piece in checkpoint.pieces(name, box):
                    self._pieces[name, piece.offsets] = piece

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a reader is for one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The saved tensors of `state`, with the chunks that overlap the shards of this rank."""
        properties = {
            dtype: TensorProperties(dtype=getattr(torch, dtype))
            for dtype in {tensor.dtype for tensor in self._checkpoint.tensors.values()}
        }
        entries = {
            name: TensorStorageMetadata(
                properties=properties[tensor.dtype], size=torch.Size(tensor.shape), chunks=[]
            )
            for name in self._names
            if (tensor := self._checkpoint.tensors.get(name)) is not None
        }
        for piece in self._pieces.values():
            chunk = ChunkStorageMetadata(torch.Size(piece.offsets), torch.Size(piece.sizes))
            entries[piece.tensor].chunks.append(chunk)
        return Metadata(state_dict_metadata=dict(entries), storage_meta=StorageMeta())

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing to do: the index was read before."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of a plan into their tensors; return a completed future."""
        self._read(plan, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, plan: LoadPlan, planner: LoadPlanner) -> None:
        """Read the items of a plan, file by file in the order of their bytes."""
        wanted: dict[str, list[tuple[Piece, ReadItem]]] = {}
        for item in plan.items:
            piece = self._piece_of(item.storage_index)
            wanted.setdefault(piece.file, []).append((piece, item))
        for name, found in wanted.items():
            with self._checkpoint.folder.open(name) as file:
                for piece, item in sorted(found, key=lambda one: one[0].start):
                    target = planner.resolve_tensor(item).detach()
                    self._fill(file, piece, item, target)
                    planner.commit_tensor(item, target)

    def _piece_of(self, wanted: MetadataIndex) -> Piece:
        """The piece that an item of a plan refers to."""
        offsets = tuple(wanted.offset or ())
        return self._pieces[wanted.fqn, offsets]

    def _fill(self, file: BinaryIO, piece: Piece, item: ReadItem, target: torch.Tensor) -> None:
        """Read the part of a piece that `item` asks for into `target`.

        Only the blocks that the part touches are read.
        """
        if not target.numel():
            return
        dtype = self._checkpoint.tensors[piece.tensor].dtype
        whole = tuple(item.lengths) == piece.sizes
        if whole and _can_be_read_into(target, dtype):
            view = bytes_of(target)
            read_blocks(file, piece, range(len(piece.crc32 or ())), view)
            return
        begin, end = _span(piece, item.storage_offsets, item.lengths, DTYPES[dtype])
        first, last = begin // BLOCK, (end - 1) // BLOCK + 1
        held = torch.empty(min(last * BLOCK, piece.length) - first * BLOCK, dtype=torch.uint8)
        read_blocks(file, piece, range(first, last), bytes_of(held))
        part = held[begin - first * BLOCK : end - first * BLOCK].clone().view(getattr(torch, dtype))
        strides = _strides(piece.sizes)
        target.copy_(part.as_strided(tuple(item.lengths), strides))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: torch must not choose this reader by the address of a checkpoint."""
        return False


def read_blocks(file: BinaryIO, piece: Piece, numbers: range, view: memoryview) -> None:
    """Read consecutive blocks of a piece into `view`; raise CorruptError if one is corrupt."""
    for at, number in enumerate(numbers):
        if not read_block(file, piece, number, view[at * BLOCK : (at + 1) * BLOCK]):
            raise CorruptError(f"{piece.file}: {piece}: does not match its checksum")


def _can_be_read_into(target: torch.Tensor, dtype: str) -> bool:
    """Whether bytes of `dtype` can be read directly into the memory of `target`."""
    same = str(target.dtype) == f"torch.{dtype}"
    return same and target.device.type == "cpu" and target.is_contiguous()


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    found: list[int] = []
    step = 1
    for size in reversed(sizes):
        found.append(step)
        step *= size
    return tuple(reversed(found))


def _span(
    piece: Piece, offsets: Sequence[int], lengths: Sequence[int], element: int
) -> tuple[int, int]:
    """First byte of a box inside a piece, and the byte after its last.

    `element` is the number of bytes per element.
    """
    strides = _strides(piece.sizes)
    first = sum(o * s for o, s in zip(offsets, strides, strict=True))
    last = sum((o + n - 1) * s for o, n, s in zip(offsets, lengths, strides, strict=True))
    return first * element, (last + 1) * element
