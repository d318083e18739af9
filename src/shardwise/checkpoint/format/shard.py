"""The file of one rank: a safetensors file, written tensor by tensor.

Its header states the offsets of each piece in the format of torch's HuggingFaceStorageReader.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from shardwise.checkpoint.format.pieces import Part, Piece

# The dtype names of safetensors.
SAFETENSORS_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64", "bool": "BOOL",
    "complex64": "C64",
}  # fmt: skip


def file_of(rank: int) -> str:
    """File name of the tensors of a rank."""
    return f"rank-{rank:05d}.safetensors"


def header_of(parts: Sequence[Part]) -> bytes:
    """The header of a file that holds these parts in order."""
    named: dict[str, Part] = {}
    for part in parts:
        # Several pieces of one tensor need different names.
        name = part.tensor if part.tensor not in named else f"{part.tensor}@{list(part.offsets)}"
        named[name] = part
    offsets = {name: {"saved_offsets": list(part.offsets)} for name, part in named.items()}
    about = {"DCP_VERSION": "1.0", "DCP_SHARDING_INFO": json.dumps(offsets)}
    return safetensors_header(named, about)


def safetensors_header(named: Mapping[str, Part], about: Mapping[str, str]) -> bytes:
    """The header of a safetensors file, with `about` in its metadata."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **about}}
    at = 0
    for name, part in named.items():
        entries[name] = {
            "dtype": SAFETENSORS_DTYPES[part.dtype],
            "shape": list(part.sizes),
            "data_offsets": [at, at + part.length],
        }
        at += part.length
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def pieces_in_file(parts: Sequence[Part], file: str, start: int) -> list[Piece]:
    """Parts with their position in a file whose data begins at byte `start`."""
    pieces = []
    for part in parts:
        pieces.append(Piece(part.tensor, part.offsets, part.sizes, file, start, part.length))
        start += part.length
    return pieces
