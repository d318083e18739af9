"""`shardwise serve`: who may ask, what is answered, and what is never read."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import IO, Any, NamedTuple

import pytest

from shardwise.spec.record import SpecError
from shardwise.web.site import page_files
from tests.command import COMMAND, environment
from tests.hub import serving_hub

pytest.importorskip("uvicorn", reason="the extra serve is not installed")
QUESTION = {"ask": "estimate", "model": "llama-3-8b", "cluster": "8xH100-SXM"}
MOST_BYTES = 2 * 2**20


class Server(NamedTuple):
    port: int
    token: str
    process: subprocess.Popen[str]

    def request(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """The status, headers and body of an answer; a header that is empty is not sent."""
        sent = {"Host": f"127.0.0.1:{self.port}", "Content-Type": "application/json"}
        sent |= {"Authorization": f"Bearer {self.token}"}
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=120)
        connection.putrequest(method, path, skip_host=True)
        for name, value in sent.items():
            if value:
                connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        told = {name.lower(): value for name, value in answer.getheaders()}
        return answer.status, told, answer.read()

    def ask(self, question: object, **headers: str) -> tuple[int, Any]:
        status, _, body = self.request(
            "POST", "/api/answer", json.dumps(question).encode(), **headers
        )
        return status, json.loads(body)


@contextmanager
def serving(
    *words: str, folder: Path | None = None, stderr: IO[str] | None = None, **variables: str
) -> Iterator[Server]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [*COMMAND, "serve", *words, "--port", str(port)],
        env=environment(**variables),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        # A signal to its group reaches no test.
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        address = process.stdout.readline()
        assert f"http://127.0.0.1:{port}/#token=" in address
        yield Server(port, address.strip().partition("token=")[2], process)
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    runs = tmp_path_factory.mktemp("runs")
    (runs / "it").mkdir()
    (runs / "it" / "run.toml").write_text(
        'model = "llama-3-8b"\ncluster = "8xH100-SXM"\nstrategy = "zero3"\n[job]\nseq_len = 2048\n'
    )
    (runs / "outside").symlink_to("/etc")
    for name, link, target in (
        ("linked", "run.toml", "/etc/passwd"),
        ("leaking", "trace.json", "/etc/passwd"),
    ):
        (runs / name).mkdir()
        (runs / name / link).symlink_to(target)
    # Of a run of its own, one file leads elsewhere.
    (runs / "mixed").mkdir()
    (runs / "mixed" / "run.toml").write_text((runs / "it" / "run.toml").read_text())
    (runs / "mixed" / "traces").symlink_to("/etc")
    os.utime(runs / "mixed", (0, 0))
    if sys.platform == "linux":
        os.mkdir(os.fsencode(runs) + b"/\xff.json")
    with serving(str(runs)) as found:
        yield found


def test_it_answers_its_page_and_its_questions(server: Server) -> None:
    status, headers, page = server.request("GET", "/")
    assert status == 200
    assert b"Which configuration should I run?" in page
    assert headers["x-content-type-options"] == "nosniff"
    for name in ("planner.js", "planner.css", "catalogue.json", "openapi.json"):
        assert server.request("GET", f"/{name}")[0] == 200
    status, found = server.ask(QUESTION)
    assert status == 200
    assert found["problems"] == []
    assert json.loads(found["json"])["time"]["step_s"] > 0


def test_the_page_may_ask_one_hub_and_the_server_asks_none(server: Server) -> None:
    _, _, page = server.request("GET", "/")
    policy = page.decode().partition('Security-Policy" content="')[2].partition('"')[0]
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}
    assert rules["connect-src"] == ["'self'", "https://huggingface.co"]
    with serving_hub() as hub:
        with serving(HF_ENDPOINT=f"{hub.address}/") as other:
            _, _, page = other.request("GET", "/")
            assert f"connect-src 'self' {hub.address} ;" in page.decode()
            status, found = other.ask({**QUESTION, "model": "acme/Small-1B"})
        assert (status, len(found["problems"])) == (200, 1)
        assert hub.asked == []


@pytest.mark.parametrize("hub", ["https://a.b; script-src *", 'https://a"b', "file:///etc", "a.b"])
def test_what_is_no_address_of_a_hub_reaches_no_page(hub: str) -> None:
    with pytest.raises(SpecError, match="HF_ENDPOINT"):
        page_files("server", hub=hub)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Authorization": ""}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Host": "example.org"}, 403),
        ({"Host": ""}, 400),
        ({"Origin": "http://example.org"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content_Type": "text/plain"}, 415),
    ],
)
def test_strangers_are_refused(server: Server, headers: dict[str, str], status: int) -> None:
    body = json.dumps(QUESTION).encode()
    assert server.request("POST", "/api/answer", body, **headers)[0] == status


def test_its_own_origin_may_ask(server: Server) -> None:
    assert server.ask(QUESTION, Origin=f"http://127.0.0.1:{server.port}")[0] == 200


def test_a_question_that_is_too_large_is_refused(server: Server) -> None:
    asked = {**QUESTION, "model": "x" * (MOST_BYTES + 1)}
    assert server.ask(asked)[0] == 413
    assert server.ask(QUESTION)[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/runs/..%2f..%2fetc%2fpasswd",
        "/runs/outside",
        "/runs/linked",
        "/runs/leaking",
        "/runs/mixed",
        "/runs/%2e%2e",
        "/runs/nothing",
        "/site.py",
    ],
)
def test_no_other_file_is_read(server: Server, path: str) -> None:
    status, _, body = server.request("GET", path)
    assert status == 404
    assert b"root:" not in body


def test_runs_of_the_folder_have_reports(server: Server) -> None:
    status, _, body = server.request("GET", "/api/runs")
    assert (status, json.loads(body)) == (200, {"runs": ["it", "mixed"]})
    assert server.request("GET", "/runs/it", Authorization="")[0] == 401
    status, headers, body = server.request(
        "GET", f"/runs/it?token={server.token}", Authorization=""
    )
    assert status == 200
    assert headers["content-type"].startswith("text/html")
    assert b"llama-3-8b" in body


def test_clients_that_leave_do_not_end_it(server: Server) -> None:
    asked = f"GET /planner.css HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n\r\n".encode()
    for _ in range(100):
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
            connection.sendall(asked * 5)
    assert server.request("GET", "/")[0] == 200


def test_a_folder_that_is_gone_is_told_in_one_sentence(tmp_path: Path) -> None:
    runs, said = tmp_path / "runs", tmp_path / "stderr"
    runs.mkdir()
    with said.open("w") as stderr, serving(str(runs), stderr=stderr) as server:
        runs.rmdir()
        for path in ("/api/runs", "/runs/it"):
            status, _, body = server.request("GET", path)
            assert (status, len(json.loads(body)["problems"])) == (404, 1)
    assert said.read_text().count("\n") == 1


@pytest.mark.parametrize(
    "tail",
    [
        "Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        "Content-Length: 500\r\n\r\n{",
    ],
    ids=["bad chunk", "half a body"],
)
@pytest.mark.parametrize("knows", [True, False])
def test_requests_that_break_off_are_no_tracebacks(tmp_path: Path, tail: str, knows: bool) -> None:
    said = tmp_path / "stderr"
    with said.open("w") as stderr, serving(stderr=stderr) as server:
        head = f"POST /api/answer HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        token = server.token if knows else "wrong"
        head += f"Authorization: Bearer {token}\r\nContent-Type: application/json\r\n"
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
                connection.sendall((head + tail).encode())
                time.sleep(0.2)
        assert server.ask(QUESTION)[0] == 200
    assert "Traceback" not in said.read_text()


def test_it_listens_on_the_loopback_only(server: Server) -> None:
    listening = subprocess.run(["ss", "-Hltn"], capture_output=True, text=True, check=True).stdout
    own = [line.split()[3] for line in listening.splitlines() if f":{server.port} " in line]
    assert own == [f"127.0.0.1:{server.port}"]


def test_a_port_in_use_is_refused_in_one_sentence(server: Server) -> None:
    done = subprocess.run(
        [*COMMAND, "serve", "--port", str(server.port)],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"cannot listen on {server.port}" in done.stderr
    assert "--port" in done.stderr


@pytest.mark.nightly
def test_all_that_its_description_allows_is_answered(server: Server, tmp_path: Path) -> None:
    tool = Path(sys.executable).with_name("schemathesis")
    if not tool.exists():
        pytest.skip("schemathesis is not installed")
    words = ["run", f"http://127.0.0.1:{server.port}/openapi.json", "--max-examples", "100"]
    words += ["--header", f"Authorization: Bearer {server.token}"]
    done = subprocess.run(
        [str(tool), *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "generated" in done.stdout


def test_a_question_of_another_shape_is_told_what_to_change(server: Server) -> None:
    status, found = server.ask({"ask": "plan", "colour": "red"})
    assert status == 422
    assert any("colour" in problem for problem in found["problems"])
    assert server.ask({"ask": "plan", "model": "nobody-1b", "cluster": "8xH100-SXM"})[0] == 200
