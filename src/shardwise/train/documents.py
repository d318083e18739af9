"""Records of data files, and the text in their fields: what is not text is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardwise.spec.chat import LONGEST_LINE
from shardwise.spec.record import SpecError


def read_records(file: Path) -> Iterator[tuple[str, str]]:
    """The lines of a jsonl file that are not blank, each with where it is."""
    for number, line in enumerate(read_lines(file), 1):
        where = f"line {number} of {file}"
        if len(line) == LONGEST_LINE and not line.endswith("\n"):
            raise SpecError(
                f"data.path: {where} is longer than {LONGEST_LINE:,} characters; split this record"
            )
        if line.strip():
            yield line, where


def read_lines(file: Path) -> Iterator[str]:
    """The lines of a UTF-8 file; a line longer than the limit comes in parts."""
    with file.open(encoding="utf-8") as stream:
        while line := stream.readline(LONGEST_LINE):
            yield line


def require_text(
    value: Any, field: str, where: str, advice: str = "correct or remove this record"
) -> str:
    """`value` if it is text that can be tokenized; raise SpecError that says what it is instead."""
    if not isinstance(value, str):
        reason = f"is {_kind(value)}, not text"
    elif not _is_unicode(value):
        reason = "has half of a surrogate pair, which is no character"
    else:
        return value
    raise SpecError(f"data.path: the field {field!r} in {where} {reason}; {advice}")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _kind(value: Any) -> str:
    kinds = {type(None): "null", dict: "an object", list: "a list", bool: "true or false",
             bytes: "binary"}  # fmt: skip
    return kinds.get(type(value), "a number")
