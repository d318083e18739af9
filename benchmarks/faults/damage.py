"""Damage to committed checkpoints that the next run must detect.

Each function damages the checkpoint `step`; `earlier` is the one before it. It returns a word that
the error message must contain.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

from shardwise.checkpoint.format import layout, manifest
from shardwise.checkpoint.format.checksum import crc32
from shardwise.checkpoint.format.manifest import read_manifest, write_manifest

SHARD, OTHER = "rank-00001.safetensors", "rank-00000.safetensors"
INDEX = "rank-00001.index"


def truncated(step: Path, earlier: Path) -> str:
    os.truncate(step / SHARD, (step / SHARD).stat().st_size * 2 // 3)
    return SHARD


def bit_flip(step: Path, earlier: Path) -> str:
    data = bytearray((step / SHARD).read_bytes())
    data[len(data) * 3 // 4] ^= 1 << 3
    (step / SHARD).write_bytes(data)
    return SHARD


def zeroed_page(step: Path, earlier: Path) -> str:
    data = bytearray((step / SHARD).read_bytes())
    data[-4096:] = bytes(4096)
    (step / SHARD).write_bytes(data)
    return SHARD


def missing_shard(step: Path, earlier: Path) -> str:
    (step / SHARD).unlink()
    return SHARD


def missing_manifest(step: Path, earlier: Path) -> str:
    (step / manifest.NAME).unlink()
    return manifest.NAME


def swapped_shards(step: Path, earlier: Path) -> str:
    (step / SHARD).rename(step / "aside")
    (step / OTHER).rename(step / SHARD)
    (step / "aside").rename(step / OTHER)
    return OTHER


def stale_shard(step: Path, earlier: Path) -> str:
    shutil.copy(earlier / SHARD, step / SHARD)
    return SHARD


def mixed_steps(step: Path, earlier: Path) -> str:
    for name in (SHARD, INDEX):
        shutil.copy(earlier / name, step / name)
    return INDEX


def _sign(step: Path, name: str, data: bytes) -> None:
    """Replace the layout by another file and list that in the manifest, as an attacker could."""
    (step / name).write_bytes(data)
    saved = read_manifest((step / manifest.NAME).read_bytes())
    files = [
        one.but(name=name, bytes=len(data), head=len(data), crc32=crc32(data))
        if one.name == layout.NAME
        else one
        for one in saved.files
    ]
    (step / manifest.NAME).write_bytes(write_manifest(saved.but(files=tuple(files))))


class _Evil:
    """Creates a folder when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def evil_mark(step: Path) -> Path:
    return step.parent / "code-ran"


def malicious_metadata(step: Path, earlier: Path) -> str:
    code = pickle.dumps(_Evil(evil_mark(step)))
    (step / ".metadata").write_bytes(code)
    _sign(step, layout.NAME, code)
    return layout.NAME


def symlink(step: Path, earlier: Path) -> str:
    elsewhere = step.parent / "elsewhere"
    shutil.move(step / SHARD, elsewhere)
    (step / SHARD).symlink_to(elsewhere)
    return SHARD


def leads_out(step: Path, earlier: Path) -> str:
    """The manifest is the only file with names of others."""
    _sign(step, f"../{layout.NAME}", (step / layout.NAME).read_bytes())
    return manifest.NAME


DAMAGES: dict[str, Callable[[Path, Path], str]] = {
    "truncated": truncated,
    "bit flip": bit_flip,
    "zeroed page": zeroed_page,
    "missing shard": missing_shard,
    "missing manifest": missing_manifest,
    "swapped shards": swapped_shards,
    "stale shard": stale_shard,
    "mixed-step directory": mixed_steps,
    "malicious metadata": malicious_metadata,
    "symlink": symlink,
    "`../`": leads_out,
}
