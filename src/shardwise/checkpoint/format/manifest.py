"""What a checkpoint of ours says about itself: JSON, written last, with a checksum of its own.

Nothing here grows with the number of parameters, only with that of files.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from shardwise.checkpoint.format.checksum import crc32
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.spec.record import Record, SpecError

NAME = "manifest.json"
VERSION = 1
Whole = Annotated[int, Field(ge=0, lt=2**63)]
# The checksum has a fixed place, so that it covers every byte behind it.
_HEAD = '{{"crc32": "{:08x}", "manifest": '
_TAIL = b"}\n"


class FileRecord(Record):
    """One file as it was written. `crc32` is of its first `head` bytes.

    Of a file of tensors that is its header; each tensor has checksums in the index.
    """

    name: str
    bytes: Whole
    head: Whole
    crc32: Annotated[int, Field(ge=0, lt=2**32)]


class Manifest(Record):
    """A checkpoint of one step."""

    # Of this format.
    version: Annotated[int, Field(ge=VERSION, le=VERSION)] = VERSION
    step: Whole
    world: Annotated[int, Field(ge=1)]
    # Sequences of the data that all ranks together have been given: where they go on.
    sequences: Whole
    run: dict[str, Any]
    versions: dict[str, str]
    files: tuple[FileRecord, ...] = ()


def write_manifest(manifest: Manifest) -> bytes:
    body = manifest.model_dump_json(indent=1).encode()
    return _HEAD.format(crc32(body)).encode() + body + _TAIL


def read_manifest(data: bytes) -> Manifest:
    """Raises UntrustedError where it is none, or is not what was written."""
    head = len(_HEAD.format(0))
    body = data[head : -len(_TAIL)]
    if data != _HEAD.format(crc32(body)).encode() + body + _TAIL:
        raise UntrustedError("is not what was written: its checksum is another")
    try:
        return Manifest.read(json.loads(body), where=NAME)
    except (ValueError, RecursionError, TypeError, SpecError) as error:
        raise UntrustedError(f"is no manifest: {error}"[:300]) from None
