"""An opened checkpoint: its tensors, and the files that hold the pieces of each.

In format 2, a rank reads the layout and the index of each rank whose shards it needs. In format 1,
the pieces of all ranks are in one index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol

from shardwise.checkpoint.format.checksum import crc32
from shardwise.checkpoint.format.folder import Folder
from shardwise.checkpoint.format.index_v1 import NAME as INDEX_V1
from shardwise.checkpoint.format.layout import NAME as LAYOUT
from shardwise.checkpoint.format.layout import Layout
from shardwise.checkpoint.format.manifest import FileRecord, Manifest
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import Piece, Tensor
from shardwise.checkpoint.format.read_checkpoint import (
    Ranks,
    read_index_v1,
    read_manifest,
    read_rank,
    read_ranks,
)
from shardwise.checkpoint.format.shard import file_of
from shardwise.checkpoint.format.sharding import Box
from shardwise.checkpoint.verify.coverage import coverage_problem, problems_of


class Checkpoint(Protocol):
    """A checkpoint of either format."""

    folder: Folder
    manifest: Manifest
    # All tensors, except tensors that belong to a single rank other than this one.
    tensors: Mapping[str, Tensor]

    def pieces(self, tensor: str, box: Box) -> list[Piece]:
        """Pieces of the tensor `tensor` that overlap a box."""
        ...


def open_checkpoint(folder: Folder, rank: int = 0, size: int = 1) -> Checkpoint:
    """Open a checkpoint as rank `rank` of `size`; raise UntrustedError if it is inconsistent.

    Every rank checks the files that all ranks need. The files of single ranks are divided: this
    rank checks those of `rank`, `rank + size` and so on.
    """
    manifest = read_manifest(folder)
    if manifest.version == 1:
        return _FormatOne(folder, manifest, rank, size)
    return _FormatTwo(folder, manifest, rank, size)


class _FormatOne:
    """A checkpoint with one index of all pieces."""

    def __init__(self, folder: Folder, manifest: Manifest, rank: int, size: int) -> None:
        self.folder, self.manifest = folder, manifest
        saved = read_index_v1(folder, manifest)
        self.tensors: Mapping[str, Tensor] = saved.tensors
        files = {record.name: record for record in manifest.files}
        for record in files.values():
            _check_size(folder, record)
        for piece in saved.pieces:
            held = files.get(piece.file)
            if held is None or piece.start + piece.length > held.bytes:
                raise UntrustedError(f"{piece.file}: {piece} exceeds the file")
        for tensor, problem in problems_of(saved):
            raise UntrustedError(f"{tensor}: {problem}")
        for record in [one for one in manifest.files if one.name != INDEX_V1][rank::size]:
            _check_head(folder, record)
        self._pieces: dict[str, list[Piece]] = {name: [] for name in saved.tensors}
        for piece in saved.pieces:
            self._pieces[piece.tensor].append(piece)

    def pieces(self, tensor: str, box: Box) -> list[Piece]:
        return [one for one in self._pieces[tensor] if Box(one.offsets, one.sizes).overlaps(box)]


class _FormatTwo:
    """A checkpoint with a layout, and an index per rank."""

    def __init__(self, folder: Folder, manifest: Manifest, rank: int, size: int) -> None:
        self.folder, self.manifest, self._rank = folder, manifest, rank
        self._ranks = read_ranks(folder, manifest)
        self._pieces: dict[int, dict[str, list[Piece]]] = {}
        own: list[Tensor] = []
        for tensor, problem in listed_problems(self._ranks.layout):
            raise UntrustedError(f"{LAYOUT}: {tensor}: {problem}")
        for number in range(rank, manifest.world, size):
            index = read_rank(folder, self._ranks, number)
            if any(self._ranks.table[number]):
                record = head_record(self._ranks, number)
                _check_size(folder, record)
                _check_head(folder, record)
            if number == rank:
                own = index.own
                self._pieces[rank] = _by_tensor(index.pieces)
        self.tensors: Mapping[str, Tensor] = {
            **self._ranks.layout.tensors,
            **{tensor.name: tensor for tensor in own},
        }

    def pieces(self, tensor: str, box: Box) -> list[Piece]:
        if 0 in box.sizes:
            return []
        layout = self._ranks.layout
        ranks = layout.ranks_over(tensor, box) if tensor in layout.tensors else [self._rank]
        return [
            piece
            for rank in ranks
            for piece in self._of_rank(rank).get(tensor, ())
            if Box(piece.offsets, piece.sizes).overlaps(box)
        ]

    def _of_rank(self, rank: int) -> dict[str, list[Piece]]:
        """Pieces that a rank wrote, by tensor; its index is read on first use."""
        if rank not in self._pieces:
            self._pieces[rank] = _by_tensor(read_rank(self.folder, self._ranks, rank).pieces)
        return self._pieces[rank]


def listed_problems(layout: Layout) -> Iterator[tuple[str, str]]:
    """Yield each tensor whose listed pieces do not cover it, and the problem.

    A rule always covers its tensor.
    """
    for name, (tensor, listed) in layout.listed.items():
        if why := coverage_problem(tensor, [Piece(name, *box, "", 0, 0) for _, box in listed]):
            yield name, why


def head_record(ranks: Ranks, rank: int) -> FileRecord:
    """Size of a rank's file of tensors, and the size and checksum of its header."""
    found = ranks.table[rank]
    return FileRecord(
        name=file_of(rank), bytes=found.bytes, head=found.head, crc32=found.head_crc32
    )


def _by_tensor(pieces: list[Piece]) -> dict[str, list[Piece]]:
    """Pieces by the name of their tensor."""
    found: dict[str, list[Piece]] = {}
    for piece in pieces:
        found.setdefault(piece.tensor, []).append(piece)
    return found


def _check_size(folder: Folder, record: FileRecord) -> None:
    """Raise UntrustedError unless a file has the size in its record."""
    try:
        size = folder.size(record.name)
    except FileNotFoundError:
        raise UntrustedError(f"{record.name} is missing") from None
    if size != record.bytes:
        raise UntrustedError(f"{record.name} has {size:,} bytes, expected {record.bytes:,}")


def _check_head(folder: Folder, record: FileRecord) -> None:
    """Raise UntrustedError unless the first bytes of a file match the checksum in its record."""
    with folder.open(record.name) as file:
        if crc32(file.read(record.head)) != record.crc32:
            raise UntrustedError(f"{record.name}: its header does not match its checksum")
