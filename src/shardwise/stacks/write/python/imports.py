"""Write the import lines of a script, in the order of code formatters."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

WIDTH = 100


class Import(NamedTuple):
    """`import module` or `from module import name`, with an optional alias."""

    module: str
    name: str | None = None
    alias: str | None = None

    @property
    def bound(self) -> str:
        """The name that the import defines in the script."""
        return self.alias or self.name or self.module.partition(".")[0]


def import_lines(imports: Iterable[Import]) -> str:
    """The import lines in groups: the standard library, other packages, the user's code."""
    groups: dict[int, list[Import]] = {0: [], 1: [], 2: []}
    for one in imports:
        groups[_origin(one)].append(one)
    return "\n\n".join(_group(group) for group in groups.values() if group)


def _origin(one: Import) -> int:
    """The number of the group that an import belongs to."""
    package = one.module.partition(".")[0]
    if package in sys.stdlib_module_names:
        return 0
    return 1 if package in ("torch", "transformers", "lightning") else 2


def _group(imports: list[Import]) -> str:
    """The lines of one group: `import` first, then `from`, each sorted."""
    modules = sorted((one for one in imports if one.name is None), key=_order_of_module)
    written = [f"import {one.module}{f' as {one.alias}' if one.alias else ''}" for one in modules]
    for module in sorted({one.module for one in imports if one.name is not None}):
        names = [str(one.name) for one in imports if one.module == module and one.name is not None]
        written.append(_from_line(module, sorted(names, key=_order_of_name)))
    return "\n".join(written)


def _order_of_module(one: Import) -> str:
    return one.module.lower()


def _order_of_name(name: str) -> tuple[int, str]:
    """A sort key: constants first, then classes, then other names."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
    return kind, name


def _from_line(module: str, names: list[str]) -> str:
    """A `from` import, on several lines if it is too long."""
    line = f"from {module} import {', '.join(names)}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"from {module} import (", *(f"    {name}," for name in names), ")"])
