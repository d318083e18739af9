"""Read the catalogue's tables one entry at a time, which is much faster than parsing all."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("catalogue")
_HEADER = re.compile(r'^\[(?:"([^"\]]+)"|([^"\].]+))(?:\.[a-z_]+)?\]$', re.MULTILINE)


@cache
def sections(file: str) -> Mapping[str, str]:
    """The TOML text of each entry of a catalogue file, by name."""
    text = FOLDER.joinpath(file).read_text(encoding="utf-8")
    found: dict[str, str] = {}
    headers = list(_HEADER.finditer(text))
    for header, following in zip(headers, [*headers[1:], None], strict=True):
        end = following.start() if following else len(text)
        name = header[1] or header[2]
        found[name] = found.get(name, "") + text[header.start() : end]
    return found


@cache
def entry(file: str, name: str) -> dict[str, Any]:
    """The fields of one entry of a catalogue file."""
    parsed: dict[str, Any] = tomllib.loads(sections(file)[name])[name]
    return parsed
