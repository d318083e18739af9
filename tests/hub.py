"""A small hub on the loopback, which answers for a config.json as the real one does."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import unquote

TOKEN = "hf_loopback"
# Where the real hub sends those who ask for a small file.
KEPT = "/api/resolve-cache/models/"
_FILE = "config.json"


@dataclass
class Shared:
    """A model of the hub: its config.json by revision, and how the hub answers for it."""

    configs: Mapping[str, bytes] = field(default_factory=dict)
    gated: bool = False
    # Only a token sees it.
    private: bool = False
    # Bytes that the hub says the file has; None says nothing.
    told: int | None = -1
    endless: bool = False
    # The address of another host that has the file.
    elsewhere: str = ""


class Asked(NamedTuple):
    """A request that a hub got."""

    method: str
    path: str
    token: str


@dataclass
class Hub:
    """A hub that runs: its address, what it has, and what it was asked."""

    address: str = ""
    models: dict[str, Shared] = field(default_factory=dict)
    asked: list[Asked] = field(default_factory=list)


def commit_of(config: bytes) -> str:
    """The commit that has this config.json."""
    return hashlib.sha1(config).hexdigest()


@contextmanager
def serving_hub(models: dict[str, Shared] | None = None) -> Iterator[Hub]:
    """A hub with these models, until the context ends."""
    hub = Hub(models=models or {})
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *_: object) -> None:
        return

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        token = self.headers.get("authorization", "").removeprefix("Bearer ")
        self.hub.asked.append(Asked(self.command, self.path, token))
        kept = self.path.startswith(KEPT)
        path = self.path.removeprefix(KEPT) if kept else self.path.replace("/resolve/", "/")
        parts = path.strip("/").split("/")
        name, revision, file = "/".join(parts[:2]), "".join(parts[2:3]), parts[3:]
        model = self.hub.models.get(name)
        if model is None or (model.private and token != TOKEN):
            # Who has no token is not told which models there are.
            self._refuse(404 if token == TOKEN else 401, "RepoNotFound")
        elif model.gated:
            self._refuse(403 if token == TOKEN else 401, "GatedRepo")
        elif (config := self._config(model, unquote(revision))) is None:
            self._refuse(404, "RevisionNotFound")
        elif file != [_FILE] or not config:
            self._refuse(404, "EntryNotFound", commit_of(config))
        elif kept:
            self._file(model, config)
        else:
            self._redirect(model, config, f"{KEPT}{name}/{commit_of(config)}/{_FILE}")

    def _redirect(self, model: Shared, config: bytes, address: str) -> None:
        """Send the client to the file, on this host or on another."""
        told = {"Location": f"{model.elsewhere}{address}", "X-Repo-Commit": commit_of(config)}
        if model.elsewhere:
            told |= {"X-Linked-Size": str(len(config)), "X-Linked-Etag": f'"{commit_of(config)}"'}
        self._send(302 if model.elsewhere else 307, told)

    def _config(self, model: Shared, revision: str) -> bytes | None:
        """The config.json of a branch or a commit; None if there is no such revision."""
        by_commit = {commit_of(config): config for config in model.configs.values()}
        return model.configs.get(revision, by_commit.get(revision))

    def _file(self, model: Shared, config: bytes) -> None:
        size = len(config) if model.told == -1 else model.told
        told = {"ETag": f'"{commit_of(config)}"', "X-Repo-Commit": commit_of(config)}
        if size is not None:
            told["Content-Length"] = str(size)
        self._send(200, told)
        try:
            while self.command == "GET":
                self.wfile.write(config)
                if not model.endless:
                    break
        except OSError:
            self.close_connection = True  # the client has had enough

    def _refuse(self, status: int, code: str, commit: str = "") -> None:
        self._send(status, {"X-Error-Code": code, "Content-Length": "0", "X-Repo-Commit": commit})

    def _send(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        # Pages of others may read a hub.
        for name, value in {
            "Access-Control-Allow-Origin": "*",
            "Access-Control-Expose-Headers": "X-Error-Code, X-Repo-Commit, ETag",
            **headers,
        }.items():
            if value:
                self.send_header(name, value)
        self.end_headers()
