"""Records of the code as tables: every key with its values, default and meaning.

The meaning of a field is the comment above it in the code; where there is none, or it tells why and
not what, `meanings.toml` says it.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

from make.values import schema_of, show_values

MEANINGS: dict[str, dict[str, str]] = tomllib.loads(
    (Path(__file__).parent / "meanings.toml").read_text(encoding="utf-8")
)
# Where a validator fills in what the type alone would require.
FILLED = MEANINGS.pop("filled")


def find_record(path: str) -> Any:
    """The class that `package.module.Name` names."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def fields_table(path: str) -> str:
    """A Markdown table of the fields of a record of run.toml."""
    record = find_record(path)
    rows = ["| key | value | default | meaning |", "|---|---|---|---|"]
    for key, field in record.model_fields.items():
        value = show_values(field.annotation, field.metadata)
        default = _default(record, key, field)
        rows.append(f"| `{key}` | {value} | {default} | {meaning(record, key)} |")
    return "\n".join(rows)


def keys_table(path: str, at: str = "") -> str:
    """A Markdown table of the keys of a NamedTuple as JSON, those of its parts below them."""
    head = ["| key | value | present | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *_keys(find_record(path), at)])


def _keys(record: Any, at: str) -> list[str]:
    rows = []
    hints = hints_of(record)
    optional = set(record._field_defaults)
    for key in record._fields:
        part, many = part_of(hints[key])
        names, hint = _written(record, key, hints[key])
        shown = "list of objects" if many else "object" if part else show_values(hint, [])
        shown = shown.replace("a table, name = anything", "object").replace("a table", "object")
        known = "if known" if key in optional or _may_lack(hint) else "always"
        for name in names:
            path = f"{at}{name}{'[]' if many else ''}"
            rows.append(f"| `{path}` | {shown} | {known} | {meaning(record, key)} |")
            if part:
                rows += _keys(part, f"{path}.")
    return rows


# What a field is called in JSON, where Python has another use for the word.
RENAMED = {("Provenance", "origin"): "from"}
# A mapping that JSON writes as a key for each of its own keys.
SPREAD = {("TimeProfile", "inside_s"): "{}_s"}


def _written(record: Any, key: str, hint: Any) -> tuple[list[str], Any]:
    """The keys in JSON of a field, and the annotation of each."""
    spread = SPREAD.get((record.__name__, key))
    if spread is None:
        return [RENAMED.get((record.__name__, key), key)], hint
    names, value = _arguments(_arguments(hint)[0])
    return [spread.format(name) for name in _arguments(names)], value


def profile_schema(path: str) -> dict[str, Any]:
    """The JSON schema of a NamedTuple as `to_dict` writes it. Keys may be added later."""
    record = find_record(path)
    whole = _object(record)
    version = importlib.import_module(record.__module__).SCHEMA
    whole["properties"] = {"schema": {"const": version}, **whole["properties"]}
    whole["required"] = ["schema", *whole["required"]]
    told = plain((record.__doc__ or "").partition("\n")[0])
    return {"$schema": DRAFT, "title": record.__name__, "description": told, **whole}


# The newest draft that editors of TOML support as well.
DRAFT = "http://json-schema.org/draft-07/schema#"


def _object(record: Any) -> dict[str, Any]:
    hints = hints_of(record)
    properties: dict[str, Any] = {}
    required = []
    for key in record._fields:
        part, many = part_of(hints[key])
        names, hint = _written(record, key, hints[key])
        schema = _object(part) if part else schema_of(hint, [])
        if many:
            schema = {"type": "array", "items": schema}
        for name in names:
            properties[name] = {**schema, "description": plain(meaning(record, key))}
            if key not in record._field_defaults and not _may_lack(hint):
                required.append(name)
    return {"type": "object", "properties": properties, "required": required}


def hints_of(record: Any) -> dict[str, Any]:
    """The annotations of a NamedTuple, evaluated."""
    return get_type_hints(record)


def part_of(annotation: Any) -> tuple[Any, bool]:
    """The record inside an annotation, if any, and whether there may be several."""
    for one in (annotation, *_arguments(annotation)):
        if hasattr(one, "_fields"):
            return one, getattr(annotation, "__origin__", None) is tuple
        if getattr(one, "__origin__", None) is tuple and hasattr(one.__args__[0], "_fields"):
            return one.__args__[0], True
    return None, False


def _may_lack(annotation: Any) -> bool:
    return type(None) in _arguments(annotation)


def _arguments(annotation: Any) -> tuple[Any, ...]:
    return tuple(getattr(annotation, "__args__", ()))


def meaning(record: Any, key: str) -> str:
    """What a field means, as one line; empty if nobody says so."""
    said = MEANINGS.get(record.__name__, {}).get(key)
    return said or comments(record).get(key, "")


@cache
def comments(record: Any) -> dict[str, str]:
    """The comment right above each field of a class, as a sentence."""
    source = inspect.getsource(record)
    lines = [line.strip() for line in source.splitlines()]
    found = {}
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        above: list[str] = []
        for line in reversed(lines[: node.lineno - 1]):
            if not line.startswith("# "):
                break
            above.insert(0, line.removeprefix("# "))
        if above:
            found[node.target.id] = " ".join(above)
    return found


def plain(markdown: str) -> str:
    """The same without the marks of Markdown."""
    return markdown.replace("`", "")


def _default(record: Any, key: str, field: Any) -> str:
    filled = FILLED.get(f"{record.__name__}.{key}")
    if filled:
        return filled
    if field.is_required():
        return "required"
    if field.default_factory is not None:
        return "empty"
    if field.default is None:
        return "unset"
    if hasattr(field.default, "model_fields_set"):
        return "as in its own section"
    shown = str(field.default).lower() if isinstance(field.default, bool) else field.default
    return f"`{shown}`" if shown not in ("", ()) else "empty"
