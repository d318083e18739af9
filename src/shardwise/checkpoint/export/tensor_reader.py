"""Read full tensors from the pieces that ranks saved, verifying every byte."""

from __future__ import annotations

from typing import BinaryIO

import torch

from shardwise.checkpoint.dcp.raw import bytes_of
from shardwise.checkpoint.dcp.reader import CorruptError, read_blocks
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import Piece
from shardwise.checkpoint.format.sharding import full_box
from shardwise.checkpoint.verify.opened import Checkpoint

# A checkpoint of many ranks has more files than a process may open.
_MAX_OPEN_FILES = 128


class TensorReader:
    """Reads the full tensors of one checkpoint, one at a time; a context manager.

    The index must have been checked: the pieces cover their tensors.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._open: dict[str, BinaryIO] = {}

    def read(self, name: str) -> torch.Tensor:
        """Read a full tensor; raise CorruptError, which names the file and the tensor."""
        tensor = self._checkpoint.tensors[name]
        full = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for piece in self._checkpoint.pieces(name, full_box(tensor.shape)):
            self._fill(piece, _slice_of(full, piece))
        return full

    def _fill(self, piece: Piece, target: torch.Tensor) -> None:
        """Fill `target`, the part of the full tensor that the piece holds, from the piece's file.

        Raises CorruptError if the file cannot be read or does not match its checksums.
        """
        buffer = target
        if not target.is_contiguous():
            buffer = torch.empty(target.shape, dtype=target.dtype)
        try:
            file = self._file(piece.file)
            read_blocks(file, piece, range(len(piece.crc32 or ())), bytes_of(buffer))
        except (OSError, UntrustedError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise CorruptError(f"{piece.file}: {piece}: cannot be read: {reason}") from None
        if buffer is not target:
            target.copy_(buffer)

    def _file(self, name: str) -> BinaryIO:
        """An open file of the checkpoint; at most _MAX_OPEN_FILES stay open."""
        file = self._open.pop(name, None)
        if file is None:
            if len(self._open) >= _MAX_OPEN_FILES:
                # Close the least recently used one.
                self._open.pop(next(iter(self._open))).close()
            file = self._checkpoint.folder.open(name)
        self._open[name] = file
        return file

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()


def _slice_of(full: torch.Tensor, piece: Piece) -> torch.Tensor:
    """View of the part of a full tensor that a piece holds."""
    part = full
    for axis, (begin, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
        part = part.narrow(axis, begin, size)
    return part
