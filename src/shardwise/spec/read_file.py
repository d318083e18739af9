"""Read files that others wrote: regular files of reasonable size, JSON and TOML that is bounded.

Whatever is wrong with a file is one sentence: a pipe that never ends, a text of gigabytes, keys
that come twice, values nested without end, numbers of thousands of digits.
"""

from __future__ import annotations

import json
import os
import stat
import tomllib
from collections.abc import Iterable
from errno import EINVAL, EISDIR
from pathlib import Path
from typing import Any, BinaryIO

from shardwise.spec.record import SpecError
from shardwise.spec.unique_keys import KeyTwiceError, unique_keys

# A configuration is a few kilobytes, and TOML is parsed slowly.
LARGEST_BYTES, LARGEST_TOML_BYTES = 2**22, 2**20
# Code that reads a value may call itself for each level.
DEEPEST = 100
# In a line of TOML: a key of a hundred thousand parts would be parsed for minutes.
MOST_DOTS = 10_000


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file to read; OSError for a pipe or a device, which may never end."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(handle).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(EISDIR, os.strerror(EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise OSError(EINVAL, "it is not a regular file; copy it to one", str(path))
        return open(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def read_bytes(path: Path, what: str, most: int = LARGEST_BYTES) -> bytes:
    """The content of a file; SpecError, which begins with `what`, if it has more bytes."""
    try:
        with open_regular(path) as file:
            found = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        reason = getattr(error, "strerror", None) or error
        raise SpecError(f"{what}: cannot read {path}: {reason}") from None
    if len(found) > most:
        raise SpecError(f"{what}: {path} is too large: it has more than {most:,} bytes")
    return found


def read_json(
    path: Path, what: str, most: int = LARGEST_BYTES, *, twice: bool = False, nan: bool = False
) -> Any:
    """The value of a JSON file; `twice` and `nan` allow double keys, and NaN and infinities."""
    return parse_json(read_bytes(path, what, most), f"{what}: {path}", twice=twice, nan=nan)


def parse_json(data: bytes | str, where: str, *, twice: bool = False, nan: bool = False) -> Any:
    """The value of a JSON text; SpecError, which begins with `where`."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not a number")

    try:
        text = data if isinstance(data, str) else data.decode("utf-8-sig")
        value = json.loads(
            text,
            object_pairs_hook=None if twice else unique_keys,
            parse_constant=None if nan else refuse,
        )
    except KeyTwiceError as error:
        raise SpecError(f"{where}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{where} is not valid JSON: {reason_of(error)}") from None
    if is_too_deep(value):
        raise SpecError(f"{where} is not valid JSON: {reason_of(RecursionError())}")
    return value


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The table of a TOML file."""
    data = read_bytes(path, what, LARGEST_TOML_BYTES)
    if max(line.count(b".") for line in data.split(b"\n")) > MOST_DOTS:
        raise SpecError(f"{what}: {path} has a line of more than {MOST_DOTS:,} dots; shorten it")
    try:
        table = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise SpecError(f"{what}: {path} is not valid TOML: {reason_of(error)}") from None
    if is_too_deep(table):
        raise SpecError(f"{what}: {path} is not valid TOML: {reason_of(RecursionError())}")
    return table


def is_too_deep(value: object) -> bool:
    """Whether lists and tables are nested more than `DEEPEST` levels deep."""
    level = _containers([value])
    for _ in range(DEEPEST):
        if not level:
            return False
        parts = (one.values() if isinstance(one, dict) else one for one in level)
        level = [inner for part in parts for inner in _containers(part)]
    return bool(level)


def _containers(values: Iterable[Any]) -> list[Any]:
    return [one for one in values if isinstance(one, (dict, list))]


def reason_of(error: Exception) -> str:
    """Why a text is not valid, in a line and without advice for programmers."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if "set_int_max_str_digits" in str(error):
        return "it holds a number of thousands of digits"
    # Its first line: a message may quote the text.
    return str(error).partition("\n")[0][:160]
