"""The import lines of a script, sorted as formatters sort them."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

WIDTH = 100


class Import(NamedTuple):
    """`import module`, or `from module import name`; either under another name."""

    module: str
    name: str | None = None
    alias: str | None = None

    @property
    def bound(self) -> str:
        """The name that it gives to the script."""
        return self.alias or self.name or self.module.partition(".")[0]


def import_lines(imports: Iterable[Import]) -> str:
    """In groups: the standard library, torch and other packages, the user's own."""
    groups: dict[int, list[Import]] = {0: [], 1: [], 2: []}
    for one in imports:
        groups[_origin(one)].append(one)
    return "\n\n".join(_group(group) for group in groups.values() if group)


def _origin(one: Import) -> int:
    package = one.module.partition(".")[0]
    if package in sys.stdlib_module_names:
        return 0
    return 1 if package in ("torch", "transformers", "lightning") else 2


def _group(imports: list[Import]) -> str:
    modules = sorted((one for one in imports if one.name is None), key=_order_of_module)
    written = [f"import {one.module}{f' as {one.alias}' if one.alias else ''}" for one in modules]
    for module in sorted({one.module for one in imports if one.name is not None}):
        names = [str(one.name) for one in imports if one.module == module and one.name is not None]
        written.append(_from_line(module, sorted(names, key=_order_of_name)))
    return "\n".join(written)


def _order_of_module(one: Import) -> str:
    return one.module.lower()


def _order_of_name(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
    return kind, name


def _from_line(module: str, names: list[str]) -> str:
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])
