"""The planner's folder as a file server sends it, and a browser that reaches nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.command import ROOT

CHROMIUM = shutil.which("chromium")
OPTIONS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
LOCK = ROOT / "docs" / "make" / "planner.lock.toml"
# The only package on PyPI that holds numpy as Pyodide distributes it.
HOLDS_NUMPY = "open_webui==0.12.4"
PATIENCE_MS = 180_000


def numpy_wheel(downloads: Path) -> Path:
    """numpy's wheel of Pyodide's distribution, out of a package that carries it."""
    packages = tomllib.loads(LOCK.read_text(encoding="utf-8"))["package"]
    name = next(one["file"] for one in packages if one["name"] == "numpy")
    path = downloads / name
    if not path.exists():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", HOLDS_NUMPY]
        subprocess.run([*command, "-d", str(downloads)], check=True)
        with zipfile.ZipFile(next(downloads.glob("open_webui-*.whl"))) as holder:
            inside = next(entry for entry in holder.namelist() if entry.endswith(f"/{name}"))
            path.write_bytes(holder.read(inside))
    return path


def axe_script(downloads: Path) -> str:
    """The script that finds what is not accessible."""
    subprocess.run(["npm", "pack", "axe-core@4.14.0", "--silent"], cwd=downloads, check=True,
                   capture_output=True)  # fmt: skip
    with tarfile.open(downloads / "axe-core-4.14.0.tgz") as archive:
        script = archive.extractfile("package/axe.min.js")
        assert script is not None
        return script.read().decode()


def built_planner(output: Path, downloads: Path) -> Path:
    """Build the folder with numpy inside."""
    for tool in ("npm", "chromium"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    downloads.mkdir(exist_ok=True)
    script = ROOT / "docs" / "make" / "planner.py"
    words = [str(script), str(output), "--downloads", str(downloads)]
    subprocess.run([sys.executable, *words, "--numpy", str(numpy_wheel(downloads))], check=True)
    return output


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
        waits = "#answer[aria-busy='false']"
        self.page.locator(waits).wait_for(timeout=PATIENCE_MS)
