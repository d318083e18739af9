"""The API of the server, described as OpenAPI."""

from __future__ import annotations

from typing import Any

from shardwise.spec.version import __version__
from shardwise.web.question import Question

_TOKEN = {"token": {"type": "http", "scheme": "bearer"}}
_PROBLEMS = {
    "type": "object",
    "required": ["problems"],
    "properties": {"problems": {"type": "array", "items": {"type": "string"}}},
}
_ANSWER = {
    "type": "object",
    "required": ["problems", "notes", "exit_code"],
    "properties": {
        "problems": {"type": "array", "items": {"type": "string"}},
        "notes": {"type": "array", "items": {"type": "string"}},
        "exit_code": {"enum": [0, 1, 2]},
        "json": {"type": "string"},
        "html": {"type": "object", "additionalProperties": {"type": "string"}},
        "figures": {"type": "object", "additionalProperties": {"type": "number"}},
    },
}


def openapi(server: str) -> dict[str, Any]:
    """The OpenAPI description of the server at the address `server`."""
    question = Question.model_json_schema(ref_template="#/components/schemas/{model}")
    definitions = question.pop("$defs", {})
    return {
        "openapi": "3.1.0",
        "info": {"title": "Shardwise planner", "version": __version__},
        "servers": [{"url": server}],
        "components": {
            "securitySchemes": _TOKEN,
            "schemas": {**definitions, "Question": question, "Answer": _ANSWER},
        },
        "paths": {
            "/api/answer": {"post": _ask()},
            "/api/runs": {"get": _get("The runs of the folder.", {"runs": _strings()})},
            "/runs/{name}": {"get": _report()},
        },
    }


def _ask() -> dict[str, Any]:
    """The operation that answers a question."""
    schema = {"schema": {"$ref": "#/components/schemas/Question"}}
    return {
        "summary": "Answer a question.",
        "security": [{"token": []}],
        "requestBody": {"required": True, "content": {"application/json": schema}},
        "responses": {
            "200": _json("The answer.", {"$ref": "#/components/schemas/Answer"}),
            **_refusals(("413", "too large"), ("415", "not JSON"), ("422", "not a question")),
        },
    }


def _get(summary: str, properties: dict[str, Any]) -> dict[str, Any]:
    """An operation without parameters that returns an object with these properties."""
    schema = {"type": "object", "required": list(properties), "properties": properties}
    return {
        "summary": summary,
        "security": [{"token": []}],
        "responses": {"200": _json(summary, schema), **_refusals()},
    }


def _report() -> dict[str, Any]:
    """The operation that returns the report about a run."""
    name = {"name": "name", "in": "path", "required": True}
    page = {"description": "The report.", "content": {"text/html": {"schema": {"type": "string"}}}}
    return {
        "summary": "The report about a run.",
        "security": [{"token": []}],
        "parameters": [{**name, "schema": {"type": "string", "minLength": 1}}],
        "responses": {
            "200": page,
            "404": _json("There is none of this name.", _PROBLEMS),
            "422": _json("It cannot be read.", _PROBLEMS),
            **_refusals(),
        },
    }


def _refusals(*more: tuple[str, str]) -> dict[str, Any]:
    """Responses by status code, of 401, 403 and `more`."""
    known = (("401", "without the token"), ("403", "from another page"), *more)
    return {code: _json(f"Refused: {why}.", _PROBLEMS) for code, why in known}


def _json(description: str, schema: dict[str, Any]) -> dict[str, Any]:
    """A response with a JSON body of this schema."""
    return {"description": description, "content": {"application/json": {"schema": schema}}}


def _strings() -> dict[str, Any]:
    return {"type": "array", "items": {"type": "string"}}
