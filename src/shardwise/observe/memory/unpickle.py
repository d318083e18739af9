"""Read the pickle of a memory snapshot as plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.observe.memory.read_file import read_file
from shardwise.observe.safe_pickle import UnsafePickleError, load_pickle
from shardwise.spec.foreign_text import cut
from shardwise.spec.record import SpecError


def read_pickle(path: Path) -> Any:
    """Return the plain data in a pickle, compressed or not; raise SpecError for anything else."""
    try:
        return load_pickle(read_file(path))
    except UnsafePickleError as error:
        reason = cut(str(error), 160)
        raise SpecError(
            f"memory: {path} {reason}; record it with torch.cuda.memory._dump_snapshot"
        ) from None
