"""Write constants of a script in the style of code formatters."""

from __future__ import annotations

from shardwise.stacks.write.python.imports import WIDTH


class Code(str):
    """A Python expression, written without quotes."""


def constant(name: str, value: object) -> str:
    """The assignment of a constant."""
    return f"{name} = {written(value, WIDTH - len(name) - 3)}"


def written(value: object, room: int = WIDTH, indent: int = 0) -> str:
    """A value as Python code in the style of code formatters.

    On one line if that takes at most `room` columns, otherwise one item per line.
    """
    if isinstance(value, Code):
        return str(value)
    if isinstance(value, str):
        return quoted(value)
    if not isinstance(value, (dict, list)):
        return repr(value)
    brackets = "{}" if isinstance(value, dict) else "[]"
    inside = indent + 4
    items = [_item(item, WIDTH - inside - 1, inside) for item in _items(value)]
    short = f"{brackets[0]}{', '.join(items)}{brackets[1]}"
    if len(short) <= room and "\n" not in short:
        return short
    rows = [f"{' ' * inside}{item}," for item in items]
    return "\n".join([brackets[0], *rows, f"{' ' * indent}{brackets[1]}"])


def _items(value: dict[str, object] | list[object]) -> list[tuple[str | None, object]]:
    """Pairs of key and value; the key is None for items of a list."""
    return list(value.items()) if isinstance(value, dict) else [(None, item) for item in value]


def _item(item: tuple[str | None, object], room: int, indent: int) -> str:
    """One item of a dictionary or list as code."""
    name = "" if item[0] is None else f"{quoted(item[0])}: "
    return name + written(item[1], room - len(name), indent)


def quoted(text: str) -> str:
    """A string literal in the style of formatters: double quotes unless it contains them."""
    shown = repr(text)
    if shown.startswith("'") and '"' not in text:
        return f'"{shown[1:-1]}"'
    return shown
