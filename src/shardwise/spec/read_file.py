"""Read untrusted files: regular files of limited size, JSON and TOML of limited depth.

Every problem becomes one sentence: a pipe that never ends, gigabytes of text, duplicate keys,
values nested too deeply, numbers of thousands of digits.
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

# Most bytes of a file, and of a TOML file, which is slow to parse. Usual ones have a few kilobytes.
LARGEST_BYTES, LARGEST_TOML_BYTES = 2**22, 2**20
# Most levels of nesting, since code that reads a value may recurse for each level.
DEEPEST = 100
# Most dots in a line of TOML: a key of a hundred thousand parts would take minutes to parse.
MOST_DOTS = 10_000


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; OSError for a pipe or a device, which may never end."""
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
    """The content of a file; SpecError if it cannot be read or has more than `most` bytes.

    Messages begin with `what`.
    """
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
    """The value of a JSON file; `twice` allows duplicate keys, `nan` allows NaN and infinities.

    Raises SpecError, whose message begins with `what`.
    """
    return parse_json(read_bytes(path, what, most), f"{what}: {path}", twice=twice, nan=nan)


def parse_json(data: bytes | str, where: str, *, twice: bool = False, nan: bool = False) -> Any:
    """The value of a JSON text; `twice` allows duplicate keys, `nan` allows NaN and infinities.

    Raises SpecError, whose message begins with `where`.
    """

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
    """The table of a TOML file; raises SpecError, whose message begins with `what`."""
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
    """Why a text could not be parsed, in one line for users."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if "set_int_max_str_digits" in str(error):
        return "it holds a number of thousands of digits"
    # Only the first line, since a message may quote the text.
    return str(error).partition("\n")[0][:160]
