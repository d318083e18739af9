"""The storage writer for torch DCP: checksums while writing, then an atomic commit.

Every rank writes one file with checksums. The coordinator then adds the index and the manifest and
commits; a crash before that leaves earlier checkpoints unchanged.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from shardwise.checkpoint.dcp.failure import as_rank_error
from shardwise.checkpoint.dcp.raw import bytes_of, read_block, write_hashed
from shardwise.checkpoint.format import index
from shardwise.checkpoint.format.checksum import crc32
from shardwise.checkpoint.format.manifest import FileRecord
from shardwise.checkpoint.format.pieces import DTYPES, Piece, Tensor
from shardwise.checkpoint.format.place import Place
from shardwise.checkpoint.format.shard import Part, file_of, header_of, placed


class NotWrittenError(OSError):
    """The bytes read back differ from the bytes written."""


class Written(NamedTuple):
    """The file of a rank and its pieces."""

    file: FileRecord
    pieces: list[Piece]


class CheckpointWriter(StorageWriter):
    """Writes the checkpoint of one step."""

    def __init__(
        self,
        place: Place,
        step: int,
        rank: int,
        commit: Callable[[list[FileRecord]], None],
        reads_back: bool = True,
        failure: Exception | None = None,
    ) -> None:
        """A `failure` of this rank is reported to all instead of writing."""
        self._reads_back = reads_back
        self._place, self._step, self._rank = place, step, rank
        self._commit, self._failure = commit, failure

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a writer is for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Start the checkpoint; before planning, since torch caches plans even if they fail."""
        with as_rank_error():
            if self._failure is not None:
                raise self._failure
            if is_coordinator:
                self._place.begin(self._step)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        future: Future[list[WriteResult]] = Future()
        with as_rank_error():
            written = [self._write(plan.items, planner)] if plan.items else []
        # Torch passes these to `finish` unchanged.
        future.set_result(cast(list[WriteResult], written))
        return future

    def _write(self, items: list[WriteItem], planner: SavePlanner) -> Written:
        # Widest dtype first, so that every tensor is aligned to its element size.
        ordered = sorted(items, key=lambda item: (-DTYPES[_part(item).dtype], item.index.fqn))
        parts = [_part(item) for item in ordered]
        name, header = file_of(self._rank), header_of(parts)
        pieces = placed(parts, name, len(header))
        with self._place.create(self._step, name) as file:
            file.write(header)
            for number, item in enumerate(ordered):
                data = bytes_of(cast(torch.Tensor, planner.resolve_data(item)).detach())
                pieces[number] = pieces[number]._replace(crc32=write_hashed(file, data))
        size = len(header) + sum(piece.length for piece in pieces)
        record = FileRecord(name=name, bytes=size, head=len(header), crc32=crc32(header))
        if self._reads_back:
            self._read_back(record, pieces)
        return Written(record, pieces)

    def _read_back(self, record: FileRecord, pieces: list[Piece]) -> None:
        found = self._place.verify_from(self._step, record.name)
        if found is None:
            return
        with found as file:
            if crc32(file.read(record.head)) != record.crc32:
                raise NotWrittenError(
                    f"{record.name}: the header read back differs from the written one"
                )
            for piece in pieces:
                for number in range(len(piece.crc32 or ())):
                    if not read_block(file, piece, number):
                        raise NotWrittenError(
                            f"{record.name}: {piece} read back differs from what was written"
                        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        written = cast(list[Written], [one for found in results for one in found])
        tensors = [
            Tensor(name, _name(entry.properties.dtype), tuple(entry.size))
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        ]
        data = index.write_index(tensors, (p for one in written for p in one.pieces))
        about = FileRecord(name=index.NAME, bytes=len(data), head=len(data), crc32=crc32(data))
        with as_rank_error():
            with self._place.create(self._step, index.NAME) as file:
                file.write(data)
            self._commit([*(one.file for one in written), about])

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _part(item: WriteItem) -> Part:
    if item.type == WriteItemType.BYTE_IO or item.tensor_data is None:
        raise TypeError(f"{item.index.fqn} is not a tensor; only tensors can be saved")
    chunk = item.tensor_data.chunk
    dtype = _name(item.tensor_data.properties.dtype)
    return Part(item.index.fqn, dtype, tuple(chunk.offsets), tuple(chunk.sizes))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
