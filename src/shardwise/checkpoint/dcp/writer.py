"""Storage writer for torch DCP: writes and hashes the file of a rank, then writes its index."""

from __future__ import annotations

import os
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import (
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from shardwise.checkpoint.dcp.garbage import no_garbage_collection
from shardwise.checkpoint.dcp.raw import bytes_of, read_block, write_hashed
from shardwise.checkpoint.format.checksum import crc32
from shardwise.checkpoint.format.pieces import Part, Piece, Tensor
from shardwise.checkpoint.format.rank_index import index_of, write_rank_index
from shardwise.checkpoint.format.rank_table import RankRecord
from shardwise.checkpoint.format.shard import file_of, header_of, pieces_in_file
from shardwise.checkpoint.format.storage import CheckpointStorage


class NotWrittenError(OSError):
    """The bytes read back differ from the bytes written."""


class CheckpointWriter(StorageWriter):
    """Writes the two files of one rank: its tensors, and their index.

    `record` has their sizes and checksums; all are 0 if the rank writes nothing.
    """

    def __init__(
        self, place: CheckpointStorage, step: int, rank: int, own: list[Tensor], reads_back: bool
    ) -> None:
        """`own` are tensors of this rank alone; `reads_back` compares files after writing them."""
        self._place, self._step, self._rank = place, step, rank
        self._own, self._reads_back = own, reads_back
        self.record = RankRecord()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing to do: a writer is for one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the checkpoint was started before."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the two files of this rank, if it has tensors; return a completed future."""
        if plan.items or self._own:
            self.record = self._write(plan.items, planner)
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def _write(self, items: list[WriteItem], planner: SavePlanner) -> RankRecord:
        """Write the tensors and the index of this rank; return sizes and checksums."""
        name = file_of(self._rank)
        with no_garbage_collection():
            parts = [_part(item) for item in items]
            header = header_of(parts)
            pieces = pieces_in_file(parts, name, len(header))
        with self._place.create(self._step, name) as file:
            file.write(header)
            for number, item in enumerate(items):
                data = bytes_of(cast(torch.Tensor, planner.resolve_data(item)).detach())
                pieces[number] = pieces[number]._replace(crc32=write_hashed(file, data))
        index = write_rank_index(self._own, [n for piece in pieces for n in piece.crc32 or ()])
        with self._place.create(self._step, index_of(self._rank)) as file:
            file.write(index)
        size = len(header) + sum(piece.length for piece in pieces)
        record = RankRecord(size, len(header), crc32(header), len(index), crc32(index))
        if self._reads_back:
            self._read_back(record, pieces)
        return record

    def _read_back(self, record: RankRecord, pieces: list[Piece]) -> None:
        """Read both files from disk; raise NotWrittenError if they differ from what was written."""
        tensors, index = file_of(self._rank), index_of(self._rank)
        self._read_back_start(tensors, record.head, record.head_crc32, "the header")
        self._read_back_start(index, record.index_bytes, record.index_crc32, "the index")
        found = self._place.verify_from(self._step, tensors)
        if found is None:
            return
        with found as file:
            for piece in pieces:
                for number in range(len(piece.crc32 or ())):
                    if not read_block(file, piece, number):
                        raise NotWrittenError(
                            f"{tensors}: {piece} read back differs from what was written"
                        )

    def _read_back_start(self, name: str, size: int, checksum: int, what: str) -> None:
        """Compare the first `size` bytes of a file with a checksum; raise NotWrittenError.

        Does nothing if the store verifies its files itself.
        """
        found = self._place.verify_from(self._step, name)
        if found is None:
            return
        with found as file:
            if crc32(file.read(size)) != checksum:
                raise NotWrittenError(f"{name}: {what} read back differs from the written one")

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Nothing to do: the checkpoint is committed when all ranks have written."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """False: torch must not choose this writer by the address of a checkpoint."""
        return False


def _part(item: WriteItem) -> Part:
    """The part of a tensor that an item of a plan writes."""
    data = cast(TensorWriteData, item.tensor_data)
    dtype = str(data.properties.dtype).removeprefix("torch.")
    return Part(item.index.fqn, dtype, tuple(data.chunk.offsets), tuple(data.chunk.sizes))
