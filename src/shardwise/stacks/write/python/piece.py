"""Pieces of a script: text, and the imports that the text needs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

from shardwise.spec.foreign_text import visible

WIDTH = 100


class Piece(NamedTuple):
    """Some top-level code. Imports are `module`, `module as alias` or `module:name`."""

    code: str
    imports: tuple[str, ...] = ()


def lines(*parts: str | bool | None) -> str:
    """Join the parts that are not empty by line ends, each without its outer line ends."""
    given = [part for part in parts if isinstance(part, str) and part]
    return "\n".join(part.removeprefix("\n").removesuffix("\n") for part in given)


def assemble(description: str, pieces: Iterable[Piece]) -> str:
    """A script of all pieces, its imports sorted: the standard library, others, the user's own."""
    pieces = [piece for piece in pieces if piece.code]
    wanted = {name for piece in pieces for name in piece.imports}
    groups: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for name in wanted:
        groups[_origin(name)].append(name)
    imports = [_import_lines(group) for group in groups.values() if group]
    body = "\n\n\n".join(piece.code.strip("\n") for piece in pieces[1:])
    first = pieces[0].code.strip("\n")
    head = [_docstring(description), *imports, first]
    return "\n\n".join(head) + f"\n\n\n{body}\n"


def _docstring(text: str) -> str:
    """Lines between triple quotes, whatever they contain."""
    return '"""' + visible(text).replace("\\", "\\\\").replace('"', '\\"') + '\n"""'


def _origin(name: str) -> int:
    package = name.partition(":")[0].partition(".")[0].partition(" ")[0]
    if package in sys.stdlib_module_names:
        return 0
    return 1 if package in ("torch", "transformers") else 2


def _import_lines(names: list[str]) -> str:
    whole = sorted((name for name in names if ":" not in name), key=str.lower)
    written = [f"import {name}" for name in whole]
    modules = sorted({name.partition(":")[0] for name in names if ":" in name})
    for module in modules:
        found = [name.partition(":")[2] for name in names if name.startswith(f"{module}:")]
        written.append(_from_line(module, sorted(found, key=_import_order)))
    return "\n".join(written)


def _import_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest, as formatters sort them."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
    return kind, name


def _from_line(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])
