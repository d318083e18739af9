"""Tokens on disk: a folder of binary shards and an index, read through memory maps."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.spec.record import SpecError

INDEX = "index.json"
SHARD_TOKENS = 2**27
Tokens = npt.NDArray[np.unsignedinteger[Any]]


def write_shards(
    folder: Path,
    chunks: Iterable[Tokens],
    about: Mapping[str, Any],
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Write `chunks`, all of one dtype, as binary shards and an index with `about`.

    The folder appears only when it is complete.
    """
    building = folder.with_name(f"{folder.name}.building-{os.getpid()}")
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    lengths: list[int] = []
    dtype, file, room = "", None, 0
    try:
        for chunk in chunks:
            dtype = chunk.dtype.name
            rest = chunk
            while len(rest):
                if file is None or room == 0:
                    if file is not None:
                        file.close()
                    file = (building / f"{len(lengths):05}.bin").open("wb")
                    lengths.append(0)
                    room = shard_tokens
                part, rest = rest[:room], rest[room:]
                file.write(part.tobytes())
                lengths[-1] += len(part)
                room -= len(part)
    finally:
        if file is not None:
            file.close()
    index = {**about, "dtype": dtype, "tokens": lengths}
    (building / INDEX).write_text(json.dumps(index, indent=2))
    try:
        building.rename(folder)
    except OSError:
        # Another process has written the same folder first.
        shutil.rmtree(building, ignore_errors=True)
        if not (folder / INDEX).exists():
            raise


class TokenShards:
    """The tokens of a folder as one long array."""

    def __init__(self, folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        self.about: dict[str, Any] = index
        lengths: list[int] = index["tokens"]
        self._maps = []
        for number, length in enumerate(lengths):
            file = folder / f"{number:05}.bin"
            if (
                not file.exists()
                or file.stat().st_size != length * np.dtype(index["dtype"]).itemsize
            ):
                raise SpecError(
                    f"data: {file} has the wrong size; delete {folder} to tokenize again"
                )
            self._maps.append(np.memmap(file, dtype=index["dtype"], mode="r"))
        self._starts = np.concatenate([[0], np.cumsum(lengths)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def read(self, start: int, length: int) -> npt.NDArray[np.int64]:
        """Return `length` tokens from `start` on, across shards."""
        tokens = np.empty(length, dtype=np.int64)
        filled = 0
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while filled < length:
            offset = start + filled - int(self._starts[shard])
            part = self._maps[shard][offset : offset + length - filled]
            tokens[filled : filled + len(part)] = part
            filled += len(part)
            shard += 1
        return tokens
