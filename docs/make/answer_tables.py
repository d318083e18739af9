"""JSON that commands print, as tables for people."""

from __future__ import annotations

from make.answers import Schema, plan_schema, reason_kinds, reason_schema, whatif_schema

_NAMES = {
    "string": "text", "integer": "whole number", "number": "number", "boolean": "`true`, `false`",
    "null": "`null`", "object": "object", "array": "list",
}  # fmt: skip


def answer_table(command: str, part: str = "") -> str:
    """A Markdown table of the keys of an answer, or of one of its parts."""
    whole = {"plan": plan_schema, "whatif": whatif_schema}[command]()
    schema = whole["definitions"][part] if part else whole
    rows = ["| key | value | present | meaning |", "|---|---|---|---|"]
    for key, value in schema["properties"].items():
        known = "always" if key in schema["required"] else "if known"
        rows.append(f"| `{key}` | {_words(value)} | {known} | {value.get('description', '')} |")
    return "\n".join(rows)


def reasons_table() -> str:
    """A Markdown table of every kind of reason with its keys."""
    rows = ["| kind | meaning | keys |", "|---|---|---|"]
    for kind in reason_kinds():
        schema = reason_schema(kind)
        keys = ", ".join(f"`{key}`" for key in schema["properties"] if key != "kind")
        told = schema["description"].replace("|", "\\|")
        rows.append(f"| `{schema['properties']['kind']['const']}` | {told} | {keys} |")
    return "\n".join(rows)


def _words(schema: Schema) -> str:
    if "$ref" in schema:
        return schema["$ref"].rpartition("/")[2]
    if "const" in schema or "enum" in schema:
        return ", ".join(f"`{one}`" for one in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema or "allOf" in schema:
        return " or ".join(_words(one) for one in schema.get("anyOf", schema.get("allOf")))
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if kinds == ["array"]:
        size = f"{schema['minItems']} of: " if "minItems" in schema else "list of: "
        return size + _words(schema["items"])
    return " or ".join(_NAMES[kind] for kind in kinds)
