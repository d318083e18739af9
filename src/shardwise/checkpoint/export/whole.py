"""A tensor as a whole again, from the pieces that ranks saved; nothing in it was not verified."""

from __future__ import annotations

from typing import BinaryIO

import torch

from shardwise.checkpoint.dcp.raw import bytes_of
from shardwise.checkpoint.dcp.reader import CorruptError, read_blocks
from shardwise.checkpoint.format.folder import Folder
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import Piece, Saved

# A checkpoint of many ranks has more files than a process may have open.
_MOST_OPEN = 128


class TensorReader:
    """Reads the tensors of one checkpoint, one at a time.

    Its index must have been checked: pieces fill their tensors.
    """

    def __init__(self, folder: Folder, saved: Saved) -> None:
        self._folder, self._tensors = folder, saved.tensors
        self._pieces: dict[str, list[Piece]] = {name: [] for name in saved.tensors}
        for piece in saved.pieces:
            self._pieces[piece.tensor].append(piece)
        self._open: dict[str, BinaryIO] = {}

    def read(self, name: str) -> torch.Tensor:
        """Raises CorruptError, which names the file and the tensor."""
        tensor = self._tensors[name]
        whole = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for piece in self._pieces[name]:
            self._fill(piece, _box(whole, piece))
        return whole

    def _fill(self, piece: Piece, box: torch.Tensor) -> None:
        room = box if box.is_contiguous() else torch.empty(box.shape, dtype=box.dtype)
        try:
            file = self._file(piece.file)
            read_blocks(file, piece, range(len(piece.crc32 or ())), bytes_of(room))
        except (OSError, UntrustedError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise CorruptError(f"{piece.file}: {piece}: cannot be read: {why}") from None
        if room is not box:
            box.copy_(room)

    def _file(self, name: str) -> BinaryIO:
        file = self._open.pop(name, None)
        if file is None:
            if len(self._open) >= _MOST_OPEN:
                # The one that was not asked for the longest.
                self._open.pop(next(iter(self._open))).close()
            file = self._folder.open(name)
        self._open[name] = file
        return file

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()


def _box(whole: torch.Tensor, piece: Piece) -> torch.Tensor:
    """The part of a tensor that a piece is."""
    box = whole
    for axis, (begin, size) in enumerate(zip(piece.offsets, piece.sizes, strict=True)):
        box = box.narrow(axis, begin, size)
    return box
