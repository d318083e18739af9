"""Styles of the page and of a notebook's cell, from the CSS files of this package."""

from __future__ import annotations

from functools import cache
from importlib import resources

from markupsafe import Markup

# Themes of JupyterLab, VS Code and MkDocs say so on an element above; elsewhere the system decides.
_LIGHT = (
    '[data-jp-theme-light="true"] .shardwise, .vscode-light .shardwise, '
    '[data-md-color-scheme="default"] .shardwise'
)
_DARK = (
    '[data-jp-theme-light="false"] .shardwise, .vscode-dark .shardwise, '
    '[data-md-color-scheme="slate"] .shardwise'
)


@cache
def resource(name: str) -> str:
    """The text of a file in this package."""
    return resources.files("shardwise.report.page").joinpath(name).read_text(encoding="utf-8")


def page_style() -> Markup:
    """The CSS of a full page."""
    return Markup("\n".join([_palette(":root"), resource("parts.css"), resource("style.css")]))


def cell_style() -> Markup:
    """The CSS of a notebook's cell; it affects only elements inside class `shardwise`."""
    themes = f"{_LIGHT} {{ {resource('light.css')} }}\n{_DARK} {{ {resource('dark.css')} }}"
    rules = f".shardwise {{\n{resource('cell.css')}\n{resource('parts.css')}\n}}"
    return Markup("\n".join([_palette(".shardwise"), themes, rules]))


def _palette(selector: str) -> str:
    """CSS variables of colours for `selector`, light and dark."""
    light, dark = resource("light.css"), resource("dark.css")
    return (
        f"{selector} {{\n{light}}}\n"
        f"@media (prefers-color-scheme: dark) {{ {selector} {{\n{dark}}} }}"
    )
