"""Read a JSON file that others wrote: every fault is one SpecError, and no key comes twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardwise.spec.record import SpecError


class _TwiceError(ValueError):
    """A key comes twice."""


def read_json(path: Path, where: str) -> Any:
    """The content of a file; raise a SpecError that begins with `where`."""
    try:
        text = path.read_bytes().decode("utf-8")
        return json.loads(text, object_pairs_hook=_table)
    except OSError as error:
        raise SpecError(f"{where}: cannot be read: {error.strerror or error}") from None
    except _TwiceError as error:
        raise SpecError(f"{where}: {error}") from None
    except RecursionError:
        raise SpecError(f"{where}: is not valid JSON: it is nested too deeply") from None
    except ValueError as error:
        # Its first line: a message may quote the text.
        reason = str(error).partition("\n")[0][:120]
        raise SpecError(f"{where}: is not valid JSON: {reason}") from None


def _table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of a key that comes twice only one value would be checked; the other could be any text."""
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _TwiceError(f"key {twice[:40]!r} comes twice; keep one")
    return table
