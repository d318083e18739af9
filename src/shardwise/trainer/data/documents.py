"""Read the records of data files, and check that their fields are text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.spec.chat import LONGEST_LINE
from shardwise.spec.record import SpecError


def read_records(file: Path) -> Iterator[tuple[str, str]]:
    """Yield each line of a jsonl file that is not blank, and its place for error messages.

    The place is such as "line 3 of data.jsonl".
    """
    for number, line in enumerate(read_lines(file), 1):
        where = f"line {number} of {file}"
        if len(line) == LONGEST_LINE and not line.endswith("\n"):
            raise SpecError(
                f"data.path: {where} is longer than {LONGEST_LINE:,} characters; split this record"
            )
        if line.strip():
            yield line, where


def read_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 file; a line longer than LONGEST_LINE comes in parts."""
    with file.open(encoding="utf-8") as stream:
        while line := stream.readline(LONGEST_LINE):
            yield line


def require_text(
    value: Any, field: str, where: str, advice: str = "correct or remove this record"
) -> str:
    """Return `value` if it is text that can be tokenized; otherwise raise SpecError."""
    if not isinstance(value, str):
        reason = f"is {_kind(value)}, not text"
    elif not _is_unicode(value):
        reason = "has half of a surrogate pair, which is no character"
    else:
        return value
    raise SpecError(f"data.path: the field {field!r} in {where} {reason}; {advice}")


def _is_unicode(text: str) -> bool:
    """Whether the text can be encoded as UTF-8, that is, has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    """The JSON type of a value that is not text, in words for an error message."""
    kinds = {type(None): "null", dict: "an object", list: "a list", bool: "true or false",
             bytes: "binary"}  # fmt: skip
    return kinds.get(type(value), "a number")
