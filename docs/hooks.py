"""Tables of the documentation that are made from the code."""

from __future__ import annotations

import importlib
import re
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

MARK = re.compile(r"<!-- fields: (\S+) -->")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each mark with the fields of the record it names."""
    return MARK.sub(lambda mark: _table(mark[1]), markdown)


def _table(path: str) -> str:
    module, _, name = path.rpartition(".")
    record = getattr(importlib.import_module(module), name)
    rows = ["| key | value | default |", "|---|---|---|"]
    for key, field in record.model_fields.items():
        rows.append(f"| `{key}` | {_values(field.annotation)} | {_default(field)} |")
    return "\n".join(rows)


def _values(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(annotation))
    arguments = [a for a in get_args(annotation) if a is not type(None)]
    if get_origin(annotation) is Union or type(annotation).__name__ == "UnionType":
        return ", or ".join(_values(argument) for argument in arguments)
    if arguments and hasattr(annotation, "__metadata__"):
        return _values(arguments[0])
    if hasattr(annotation, "model_fields"):
        return "a table"
    words = {bool: "true, false", int: "whole number or size", float: "number", str: "text"}
    return words.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "decided by the rest"
    if hasattr(field.default, "model_fields_set"):
        return "as in its own section"
    shown = str(field.default).lower() if isinstance(field.default, bool) else field.default
    return f"`{shown}`" if shown != "" else ""
