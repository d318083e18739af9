"""Display of records in notebooks: higher layers register a renderer here."""

from __future__ import annotations

from collections.abc import Callable

Renderer = Callable[[object], str]
_registered: list[Renderer] = []


def register_renderer(renderer: Renderer) -> None:
    """Register a function that turns a Plan, a StepProfile or a Comparison into HTML."""
    _registered.append(renderer)


def html_of(record: object) -> str:
    """HTML of a Plan, a StepProfile or a Comparison, from the renderer registered last."""
    return _registered[-1](record)
