"""The files of the planner's page, for a browser that plans itself or for a server that does."""

from __future__ import annotations

import json
from importlib import resources
from typing import Literal

from shardwise.report.page.style import page_style, resource
from shardwise.version import __version__
from shardwise.web.catalogue import catalogue

Mode = Literal["browser", "server"]
# Modules of the page, sent as they are.
SCRIPTS = ("ask.js", "form.js", "planner.js", "run.js", "show.js", "whatif.js")
_WHERE = {
    "browser": "Memory, traffic and time, predicted in your browser: nothing you type leaves it.",
    "server": "Memory, traffic and time, predicted on this machine.",
}


def page_files(mode: Mode, docs: str = "", connects: str = "") -> dict[str, bytes]:
    """The page by file name; `docs` is the documentation's address, seen from it, and `connects`
    are other addresses that it may fetch from."""
    texts = {
        "index.html": _index(mode, docs, connects),
        "planner.css": f"{page_style()}\n{_text('planner.css')}",
        "timeline.js": resource("timeline.js"),
        "catalogue.json": json.dumps(catalogue()),
        **{name: _text(name) for name in SCRIPTS},
    }
    if mode == "browser":
        texts["worker.js"] = _text("worker.js")
    return {name: text.encode("utf-8") for name, text in texts.items()}


def offline_script(version: str) -> bytes:
    """The service worker of one version; browsers install it anew when its text changes."""
    return f'const VERSION = "{version}";\n{_text("offline.js")}'.encode()


def _index(mode: Mode, docs: str, connects: str) -> str:
    # Python needs WebAssembly; bars have their length in a style of their own.
    policy = (
        f"default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self' "
        f"'unsafe-inline'; img-src data:; connect-src 'self' {connects}; worker-src 'self'; "
        f"base-uri 'none'; form-action 'none'"
    )
    told = {"policy": policy, "mode": mode, "where": _WHERE[mode], "version": __version__}
    text = _text("index.html")
    told["docs"] = f'<a href="{docs}">documentation</a> · ' if docs else ""
    for name, value in told.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _text(name: str) -> str:
    return resources.files("shardwise.web").joinpath("page", name).read_text(encoding="utf-8")
