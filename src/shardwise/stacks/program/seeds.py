"""Random numbers that depend on names, and on nothing else."""

from __future__ import annotations

from hashlib import sha256

from shardwise.stacks.program.settings import SEED


def seed_of(name: str) -> int:
    """The seed of a layer or a sequence, so that every rank draws the same numbers."""
    digest = sha256(f"{SEED}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
