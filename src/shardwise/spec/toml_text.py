"""Write TOML with comments, and check that the text reads back to the same values."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping

from shardwise.spec.foreign_text import one_line


def toml_text(table: Mapping[str, object], comments: Iterable[str] = ()) -> str:
    """The table as TOML text, after one comment line for each of `comments`."""
    import tomli_w

    head = "".join(f"# {one_line(line)}\n" for line in comments)
    text = (f"{head}\n" if head else "") + tomli_w.dumps(table)
    if tomllib.loads(text) != _read_back(table):
        raise RuntimeError("the TOML does not read back as it was meant; nothing was written")
    return text


def _read_back(value: object) -> object:
    """A value as a TOML parser returns it."""
    if isinstance(value, Mapping):
        return {key: _read_back(item) for key, item in value.items()}
    return [_read_back(item) for item in value] if isinstance(value, (list, tuple)) else value
