"""A plain file server, and a page in Chromium that reaches nothing else."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
PATIENCE_MS = 300_000
# Rules that something on the page breaks, with the elements that do.
VIOLATIONS = """async () => (await axe.run()).violations
  .map((one) => `${one.id}: ${one.nodes.map((node) => node.html.slice(0, 120)).join(" | ")}`)"""
OPEN_DETAILS = "() => document.querySelectorAll('details').forEach((one) => { one.open = true; })"

# Waits until the page could answer a question.
READY = """() => new Promise((ready) =>
  new PerformanceObserver((list) => list.getEntriesByName("planner ready").forEach(ready))
    .observe({ type: "mark", buffered: true }))"""
# Starts a planner of its own in the page, and keeps it for the questions that follow.
START = """async () => {
  window.blocked = [];
  const seen = (list) => list.getEntries().forEach((one) => window.blocked.push(one.duration));
  new PerformanceObserver(seen).observe({ type: "longtask", buffered: true });
  const { connect } = await import(new URL("ask.js", location.href).href);
  window.planner = await connect(() => {});
}"""
ASK = "async (question) => JSON.stringify(await window.planner.search(question))"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        return


@contextmanager
def file_server(folder: Path) -> Iterator[str]:
    """The address of a plain file server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/"
    server.shutdown()


class Watched:
    """A page, what its console said, and which other addresses it asked for."""

    def __init__(self, context: Any, address: str) -> None:
        self.said: list[str] = []
        self.outside: list[str] = []
        self.page = context.new_page()
        self.address = address
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.route("**/*", self._only_here)

    def _only_here(self, route: Any) -> None:
        if route.request.url.startswith(self.address):
            route.continue_()
        else:
            self.outside.append(route.request.url)
            route.abort()

    def open(self, question: str = "") -> None:
        """Open the page and wait for its answer."""
        self.page.goto(f"{self.address}{question}")
        self.answered()

    def answered(self) -> None:
        self.page.locator("#answer[aria-busy='false']").wait_for(timeout=PATIENCE_MS)
