"""The files of the planner's page, for planning in the browser or on a server."""

from __future__ import annotations

import json
import re
from importlib import resources
from typing import Literal

from shardwise.report.page.style import page_style, resource
from shardwise.spec.record import SpecError
from shardwise.spec.version import __version__
from shardwise.web.catalogue import catalogue

Mode = Literal["browser", "server"]
# JavaScript modules of the page, served unchanged.
SCRIPTS = ("ask.js", "form.js", "hub.js", "planner.js", "run.js", "show.js", "whatif.js")
_MODE_WORDS = {
    "browser": "Memory, traffic and time, predicted in your browser: nothing you type leaves it, "
    "except the name of a model that is looked up on the hub.",
    "server": "Memory, traffic and time, predicted on this machine.",
}


# The hub on which the page looks up models, and what an address of one is like.
HUB = "https://huggingface.co"
_ADDRESS = re.compile(r"(https?://[A-Za-z0-9.:\[\]-]+)(?:/[A-Za-z0-9._/-]*)?")


def page_files(mode: Mode, docs: str = "", connects: str = "", hub: str = HUB) -> dict[str, bytes]:
    """Contents of the page's files by name.

    `docs` is the address of the documentation, relative to the page; empty for no link. `connects`
    are further addresses that the page may fetch from, separated by spaces. `hub` is the address of
    the hub; SpecError if it is none.
    """
    address = _ADDRESS.fullmatch(hub)
    if address is None:
        raise SpecError(f"HF_ENDPOINT: {hub[:80]!r} is not an address such as {HUB}")
    policy = _policy(f"{address[1]} {connects}")
    texts = {
        "index.html": _index(mode, docs, policy, hub.rstrip("/")),
        "planner.css": f"{page_style()}\n{_text('planner.css')}",
        "timeline.js": resource("timeline.js"),
        "catalogue.json": json.dumps(catalogue()),
        **{name: _text(name) for name in SCRIPTS},
    }
    if mode == "browser":
        texts["worker.js"] = _text("worker.js")
    return {name: text.encode("utf-8") for name, text in texts.items()}


def offline_script(version: str) -> bytes:
    """The service worker of one version; browsers reinstall it when its text changes."""
    return f'const VERSION = "{version}";\n{_text("offline.js")}'.encode()


def _policy(connects: str) -> str:
    """The content security policy of a page that may fetch from `connects` too."""
    # Python in the browser needs WebAssembly; bars set their length in inline styles.
    return (
        f"default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self' "
        f"'unsafe-inline'; img-src data:; connect-src 'self' {connects}; worker-src 'self'; "
        f"base-uri 'none'; form-action 'none'"
    )


def _index(mode: Mode, docs: str, policy: str, hub: str) -> str:
    """The HTML of index.html with its content security policy, mode, hub and version."""
    told = {"policy": policy, "mode": mode, "hub": hub}
    told |= {"where": _MODE_WORDS[mode], "version": __version__}
    text = _text("index.html")
    told["docs"] = f'<a href="{docs}">documentation</a> · ' if docs else ""
    for name, value in told.items():
        text = text.replace(f"{{{name}}}", value)
    return text


def _text(name: str) -> str:
    """The text of a file in the folder `page`."""
    return resources.files("shardwise.web").joinpath("page", name).read_text(encoding="utf-8")
