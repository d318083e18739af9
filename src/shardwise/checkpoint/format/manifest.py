"""The manifest of a checkpoint: JSON, written last, with its own checksum."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from shardwise.checkpoint.format.checksum import crc32
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.spec.record import Record, SpecError

NAME = "manifest.json"
# The version that is written; format 1 is still read.
VERSION = 2
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**63)]
# The checksum comes first and covers every byte after it.
_HEAD = '{{"crc32": "{:08x}", "manifest": '
_TAIL = b"}\n"


class FileRecord(Record):
    """A file of a checkpoint. `crc32` covers its first `head` bytes.

    `head` is all of a file, but only the header of a file of tensors in format 1, and of the table
    of ranks. In format 2 the files of ranks are listed in that table.
    """

    name: str
    bytes: NonNegativeInt
    head: NonNegativeInt
    crc32: Annotated[int, Field(ge=0, lt=2**32)]


class Manifest(Record):
    """A checkpoint of one step."""

    # Version of the format.
    version: Annotated[int, Field(ge=1, le=VERSION)] = VERSION
    step: NonNegativeInt
    world: Annotated[int, Field(ge=1)]
    # Number of sequences used by all ranks together; a resumed run continues after them.
    sequences: NonNegativeInt
    run: dict[str, Any]
    versions: dict[str, str]
    # Identifies the frozen weights of an adapted model, which are not in the checkpoint.
    base: str | None = None
    # The held-out loss of this step, if the run has computed it.
    eval_loss: float | None = None
    files: tuple[FileRecord, ...] = ()


def write_manifest(manifest: Manifest) -> bytes:
    """The bytes of manifest.json."""
    # Versions that do not know the held-out loss read all other manifests.
    without = {"eval_loss"} if manifest.eval_loss is None else None
    body = manifest.model_dump_json(indent=1, exclude=without).encode()
    return _HEAD.format(crc32(body)).encode() + body + _TAIL


def read_manifest(data: bytes) -> Manifest:
    """Parse a manifest; raise UntrustedError if it is invalid or was changed."""
    head = len(_HEAD.format(0))
    body = data[head : -len(_TAIL)]
    if data != _HEAD.format(crc32(body)).encode() + body + _TAIL:
        raise UntrustedError("does not match its checksum")
    try:
        return Manifest.read(json.loads(body), where=NAME)
    except (ValueError, RecursionError, TypeError, SpecError) as error:
        raise UntrustedError(f"is not a valid manifest: {error}"[:300]) from None
