"""Chat and instruction examples: the shapes of their records, and how to detect them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.spec.train import DataSettings

# The keys of each shape; a record of the shape has all of them.
_SHAPES = (
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
)
# Most characters of a record: a file without line breaks would be read into memory completely.
LONGEST_LINE = 2**24


def holds_chat(data: DataSettings | None) -> bool:
    """Whether `[data]` holds chat examples, by its format or by the first record of its files."""
    if data is None or not data.path or data.format == "text":
        return False
    if data.format == "chat":
        return True
    paths = [Path(path) for path in data.path]
    files = (file for path in paths for file in (path.glob("*.jsonl") if path.is_dir() else [path]))
    return any(starts_with_chat(file, data.text_key) for file in files)


def starts_with_chat(file: Path, text_key: str) -> bool:
    """Whether a .jsonl file's first record has the keys of a chat example and no `text_key`.

    False if the file is missing or cannot be read as text.
    """
    if file.suffix != ".jsonl" or not file.is_file():
        return False
    try:
        with file.open(encoding="utf-8") as stream:
            lines = iter(lambda: stream.readline(LONGEST_LINE), "")
            first = read_json(next((line for line in lines if line.strip()), ""))
    except (UnicodeDecodeError, OSError):
        return False
    return shape_of(first) is not None and text_key not in first


def shape_of(record: Any) -> tuple[str, ...] | None:
    """The keys that make a record a chat example; None if the record is not one."""
    known = record if isinstance(record, dict) else {}
    return next((keys for keys in _SHAPES if all(key in known for key in keys)), None)


def read_json(line: str) -> Any:
    """The value of a line of JSON; None if the line is not valid JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):  # ValueError also for integers of over 4,300 digits
        return None
