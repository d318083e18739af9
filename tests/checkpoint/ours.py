"""Checkpoints of ours in both formats, written by numpy as the formats say."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardwise.checkpoint.format.checksum import BLOCK, blocks, crc32
from shardwise.checkpoint.format.manifest import FileRecord, Manifest, write_manifest
from shardwise.checkpoint.format.pieces import Piece, Tensor

Array = np.ndarray
_SHORT = {"float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8"}


class Head(NamedTuple):
    """What is known of a file of tensors."""

    size: int
    length: int
    crc32: int


def crc32_of_blocks(data: bytes) -> tuple[int, ...]:
    """One checksum for every block."""
    return tuple(crc32(data[begin:end]) for begin, end in blocks(len(data)))


def write_ours(
    folder: Path, tensors: Mapping[str, Array], files: int = 2, step: int = 10, version: int = 2
) -> list[Piece]:
    """Every tensor is cut along its first axis, a part in each file."""
    folder.mkdir(parents=True)
    pieces: list[Piece] = []
    heads = []
    # Widest dtype first: what a file begins with is aligned for what follows.
    ordered = dict(sorted(tensors.items(), key=lambda one: -one[1].itemsize))
    for number in range(files):
        parts = {name: _part(array, number, files) for name, array in ordered.items()}
        heads.append(_write(folder / file_name(number), parts, pieces))
    if version == 1:
        known = [Tensor(name, str(array.dtype), array.shape) for name, array in tensors.items()]
        records = [named(folder / "tensors.json", index_v1(known, pieces))]
        for number, head in enumerate(heads):
            records.append(
                FileRecord(
                    name=file_name(number), bytes=head.size, head=head.length, crc32=head.crc32
                )
            )
    else:
        records = _write_format_2(folder, tensors, pieces, heads)
    told = Manifest(
        version=version, step=step, world=files, sequences=80, run={}, versions={},
        files=tuple(records),
    )  # fmt: skip
    (folder / "manifest.json").write_bytes(write_manifest(told))
    return pieces


def file_name(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def _write_format_2(
    folder: Path, tensors: Mapping[str, Array], pieces: list[Piece], heads: list[Head]
) -> list[FileRecord]:
    table = b""
    for rank, head in enumerate(heads):
        own = [piece for piece in pieces if piece.file == file_name(rank)]
        numbers = [number for piece in own for number in piece.crc32 or ()]
        index = struct.pack("<4sI", b"SWI2", 2) + b"[]" + struct.pack(f"<{len(numbers)}I", *numbers)
        (folder / f"rank-{rank:05d}.index").write_bytes(index)
        table += struct.pack("<QIIII", *head, len(index), crc32(index))
    # By rule 0 the first rank has all of it; by rule 1 all ranks divide dimension 0.
    rules: list[list[list[int]]] = [[], [[0, len(heads), 1]]]
    entries = [
        [name, str(array.dtype), array.shape, int(array.ndim > 0), 0]
        for name, array in tensors.items()
    ]
    layout = {"block": BLOCK, "axes": rules, "tensors": entries, "listed": []}
    return [
        named(folder / "layout.json", json.dumps(layout).encode()),
        named_table(folder, table),
    ]


def named_table(folder: Path, rows: bytes) -> FileRecord:
    """Write the table of fewer than 1,024 ranks: one checksum, and 24 bytes per rank."""
    head = struct.pack("<I", crc32(rows))
    (folder / "ranks.bin").write_bytes(head + rows)
    return FileRecord(name="ranks.bin", bytes=4 + len(rows), head=4, crc32=crc32(head))


def index_v1(tensors: Sequence[Tensor], pieces: Sequence[Piece]) -> bytes:
    """The tensors.json of format 1."""
    files = sorted({piece.file for piece in pieces})
    table = [
        [*tensor, [[files.index(p.file), p.start, p.offsets, p.sizes, p.crc32]
                   for p in pieces if p.tensor == tensor.name]]
        for tensor in tensors
    ]  # fmt: skip
    return json.dumps({"block": BLOCK, "files": files, "tensors": table}).encode()


def _part(array: Array, number: int, files: int) -> tuple[tuple[int, ...], Array]:
    if not array.ndim:
        return (), array if number == 0 else array[None][:0]
    each = -(-array.shape[0] // files)
    begin = min(number * each, array.shape[0])
    return (begin, *[0] * (array.ndim - 1)), array[begin : begin + each]


def _write(
    path: Path, parts: Mapping[str, tuple[tuple[int, ...], Array]], pieces: list[Piece]
) -> Head:
    table, data = {}, bytearray()
    begins: list[tuple[str, Sequence[int], Array, int]] = []
    for name, (offsets, part) in parts.items():
        if part.size == 0:
            continue
        begins.append((name, offsets, part, len(data)))
        data += part.tobytes()
        place = [begins[-1][3], len(data)]
        table[name] = {
            "dtype": _SHORT[str(part.dtype)],
            "shape": list(part.shape),
            "data_offsets": place,
        }
    header = json.dumps(table).encode()
    header += b" " * (-len(header) % 8)
    head = len(header).to_bytes(8, "little") + header
    for name, corner, part, begin in begins:
        crc = crc32_of_blocks(part.tobytes())
        at = len(head) + begin
        piece = Piece(name, tuple(corner), part.shape, path.name, at, part.nbytes, crc)
        pieces.append(piece)
    path.write_bytes(head + data)
    return Head(len(head) + len(data), len(head), crc32(head))


def named(path: Path, data: bytes) -> FileRecord:
    path.write_bytes(data)
    return FileRecord(name=path.name, bytes=len(data), head=len(data), crc32=crc32(data))
