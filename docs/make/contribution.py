"""The file of `shardwise contribute` as JSON schema."""

from __future__ import annotations

from typing import Any

from make.fields import DRAFT
from shardwise.runs.contribution.record import KIND, SCHEMA, Contribution


def contribution_schema() -> dict[str, Any]:
    """The schema of a whole file."""
    schema = Contribution.model_json_schema()
    properties = {"schema": {"const": SCHEMA}, "kind": {"const": KIND}, **schema["properties"]}
    required = ["schema", "kind", *schema["required"]]
    return {"$schema": DRAFT, **schema, "properties": properties, "required": required}
