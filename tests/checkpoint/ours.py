"""A checkpoint of ours, written by numpy as the format says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from shardwise.checkpoint.format.checksum import blocks, crc32
from shardwise.checkpoint.format.index import write_index
from shardwise.checkpoint.format.manifest import FileRecord, Manifest, write_manifest
from shardwise.checkpoint.format.pieces import Piece, Tensor

Array = np.ndarray
_SHORT = {"float32": "F32", "float16": "F16", "int64": "I64", "uint8": "U8"}


def crc32_of_blocks(data: bytes) -> tuple[int, ...]:
    """One checksum for every block."""
    return tuple(crc32(data[begin:end]) for begin, end in blocks(len(data)))


def write_ours(
    folder: Path, tensors: Mapping[str, Array], files: int = 2, step: int = 10
) -> list[Piece]:
    """Every tensor is cut along its first axis, a part in each file."""
    folder.mkdir(parents=True)
    pieces: list[Piece] = []
    records = []
    for number in range(files):
        parts = {name: _part(array, number, files) for name, array in tensors.items()}
        name = f"{number}.safetensors"
        records.append(_write(folder / name, parts, pieces))
    whole = [Tensor(name, str(array.dtype), array.shape) for name, array in tensors.items()]
    records.append(named(folder / "tensors.json", write_index(whole, pieces)))
    told = Manifest(step=step, world=files, sequences=80, run={}, versions={}, files=tuple(records))
    (folder / "manifest.json").write_bytes(write_manifest(told))
    return pieces


def _part(array: Array, number: int, files: int) -> tuple[tuple[int, ...], Array]:
    if not array.ndim:
        return (), array if number == 0 else array[None][:0]
    rows = np.array_split(np.arange(array.shape[0]), files)[number]
    begin = int(rows[0]) if len(rows) else array.shape[0]
    return (begin, *[0] * (array.ndim - 1)), array[begin : begin + len(rows)]


def _write(
    path: Path, parts: Mapping[str, tuple[tuple[int, ...], Array]], pieces: list[Piece]
) -> FileRecord:
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
    size = len(head) + len(data)
    return FileRecord(name=path.name, bytes=size, head=len(head), crc32=crc32(head))


def named(path: Path, data: bytes) -> FileRecord:
    path.write_bytes(data)
    return FileRecord(name=path.name, bytes=len(data), head=len(data), crc32=crc32(data))
