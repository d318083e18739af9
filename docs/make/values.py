"""What a field may hold, once as words and once as JSON schema, from its type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from shardwise.spec import quantity

# Quantities are numbers in base units, or texts with a unit.
QUANTITIES: dict[Any, str] = {
    quantity.parse_bytes: "size, such as `80GiB`",
    quantity.parse_rate: "rate, such as `400Gbps` or `50GB/s`",
    quantity.parse_flops: "rate of work, such as `989.5TFLOPS`",
    quantity.parse_count: "whole number, also `4k`, `4Mi`",
}
_WORDS = {bool: "`true`, `false`", int: "whole number", float: "number", str: "text"}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
_BOUNDS = {"ge": ("minimum", "at least"), "gt": ("exclusiveMinimum", "more than"),
           "le": ("maximum", "at most"), "lt": ("exclusiveMaximum", "less than")}  # fmt: skip
# Limits nobody meets are there to keep arithmetic within 64 bits; they say nothing to a reader.
_LARGE = 10**6
_QUANTITY = r"^\s*[0-9][0-9_.]*([eE][+-]?[0-9]+)?\s*[A-Za-z/]*\s*$"


def show_values(annotation: Any, metadata: list[Any]) -> str:  # noqa: PLR0911 (one for each kind)
    """The values in words."""
    annotation, metadata = _opened(annotation, metadata)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if _is_union(annotation):
        return ", or ".join(show_values(one, []) for one in arguments if one is not type(None))
    parser = _parser(metadata)
    if parser:
        return QUANTITIES[parser] + _range(metadata)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "a table"
    if origin is tuple and arguments[-1] is ...:
        return f"a list of: {show_values(arguments[0], [])}"
    if origin is tuple:
        return f"a pair: {show_values(arguments[0], [])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        inner = "anything" if arguments[1] is Any else show_values(arguments[1], [])
        return f"a table, name = {inner}"
    return _WORDS[annotation] + _range(metadata)


def schema_of(annotation: Any, metadata: list[Any]) -> dict[str, Any]:  # noqa: PLR0911 (as above)
    """The values as JSON schema."""
    annotation, metadata = _opened(annotation, metadata)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return {"enum": list(arguments)}
    if _is_union(annotation):
        parts = [schema_of(one, []) for one in arguments if one is not type(None)]
        return parts[0] if len(parts) == 1 else {"anyOf": parts}
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields.items()
        properties = {key: schema_of(field.annotation, field.metadata) for key, field in fields}
        return {"type": "object", "properties": properties}
    number = {"type": _TYPES.get(annotation), **_bounds(metadata)}
    if _parser(metadata):
        return either(number, {"type": "string", "pattern": _QUANTITY})
    if origin is tuple and arguments[-1] is ...:
        return {"type": "array", "items": schema_of(arguments[0], [])}
    if origin is tuple:
        first, *others = [schema_of(one, []) for one in arguments]
        assert all(one == first for one in others), "drafts differ on lists of unlike items"
        size = len(arguments)
        return {"type": "array", "items": first, "minItems": size, "maxItems": size}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        inner = {} if arguments[1] is Any else schema_of(arguments[1], [])
        return {"type": "object", "additionalProperties": inner}
    return number


def either(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Values of one or of the other schema, which are of different types.

    Keywords of JSON schema apply to one type each, so both stand side by side. An editor then names
    the key that is wrong; of `anyOf` it would only say that no part of it is met.
    """
    if {"enum", "anyOf"} & {*one, *other}:
        return {"anyOf": [one, other]}
    types = [*_types(one), *_types(other)]
    assert len(set(types)) == len(types)
    return {**one, **other, "type": types}


def _types(schema: dict[str, Any]) -> list[str]:
    found = schema["type"]
    return found if isinstance(found, list) else [found]


def _opened(annotation: Any, metadata: list[Any]) -> tuple[Any, list[Any]]:
    """Without `Annotated`, and with what it said beside the rest."""
    found = list(metadata)
    if get_origin(annotation) is Annotated:
        annotation, *more = get_args(annotation)
        found = [*more, *found]
    inner = [part for one in found if isinstance(one, FieldInfo) for part in one.metadata]
    return annotation, [*found, *inner]


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) is Union or type(annotation).__name__ == "UnionType"


def _parser(metadata: list[Any]) -> Any:
    functions = [one.func for one in metadata if isinstance(one, BeforeValidator)]
    return next((function for function in functions if function in QUANTITIES), None)


def _bounds(metadata: list[Any]) -> dict[str, Any]:
    return {
        name: getattr(one, bound)
        for one in metadata
        for bound, (name, _) in _BOUNDS.items()
        if hasattr(one, bound)
    }


def _range(metadata: list[Any]) -> str:
    words = [
        f"{word} {getattr(one, bound):g}"
        for one in metadata
        for bound, (_, word) in _BOUNDS.items()
        if hasattr(one, bound) and abs(getattr(one, bound)) < _LARGE
    ]
    return f", {' and '.join(words)}" if words else ""
