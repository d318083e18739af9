"""The data of a script: synthetic, from token files, or from the user's iterable."""

from __future__ import annotations

from pathlib import Path

from shardwise.spec.chat import holds_chat
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.spec.train import DataSettings
from shardwise.stacks.write.python.constants import Code, quoted
from shardwise.stacks.write.python.settings import data_of


def data_constants(run: RunSpec) -> dict[str, object]:
    """The constant TOKENS: the folder of tokens, or None for other data."""
    data = data_of(run)
    if not data.path:
        return {"TOKENS": None}
    found = token_folders(data)
    folder = found[-1].as_posix() if found else f"{Path(data.cache).as_posix()}/NAME"
    return {"TOKENS": Code(f"Path({quoted(folder)})")}


def token_folders(data: DataSettings) -> list[Path]:
    """Cached token folders of the first data file's name, the newest last.

    Empty for chat examples: their tokens carry flags that the script cannot read.
    """
    if holds_chat(data):
        return []
    stem = Path(data.path[0]).stem[:40]
    indexes = [
        index
        for index in Path(data.cache).glob("*/index.json")
        if index.parent.name.rpartition("-")[0] == stem
    ]
    return [index.parent for index in sorted(indexes, key=lambda file: file.stat().st_mtime_ns)]


def vocabulary_is_known(run: RunSpec) -> bool:
    """Whether the data needs no vocabulary size from the built model."""
    return isinstance(run.model, ModelSpec) or not data_of(run).synthetic
