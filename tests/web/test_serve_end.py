"""`shardwise serve` and its workers: how questions, workers and the server itself end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from shardwise.web.work import Reply
from shardwise.web.workers import Workers
from tests.command import PATIENCE_S
from tests.web.test_serve import QUESTION, Server, serving

psutil = pytest.importorskip("psutil")
pytestmark = pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
# Plans of a large model, one for each length: seconds of work everywhere.
LONG = {
    "ask": "curve",
    "model": "shape-310b",
    "cluster": "64x8xH100-SXM@400Gbps",
    "vary": "seq-len",
    "values": [str(1024 * n) for n in range(1, 33)],
}


@contextmanager
def serving_one(tmp_path: Path) -> Iterator[tuple[Server, Any]]:
    """A server, and its worker after the first answer."""
    with (tmp_path / "stderr").open("w") as stderr, serving(stderr=stderr) as server:
        assert server.ask(QUESTION)[0] == 200
        (worker,) = psutil.Process(server.process.pid).children(recursive=True)
        yield server, worker


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_busy(worker: Any) -> Callable[[], bool]:
    """Whether it computes since now: a quarter of a second of a processor's time."""
    before = worker.cpu_times().user
    return lambda: worker.cpu_times().user > before + 0.25


def is_gone(worker: Any) -> bool:
    return not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize("to_group", [True, False])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_ends_all_during_a_plan(
    tmp_path: Path, number: signal.Signals, to_group: bool
) -> None:
    with serving_one(tmp_path) as (server, worker), ThreadPoolExecutor() as threads:
        busy = is_busy(worker)
        asked = threads.submit(server.ask, LONG)
        # A client that does not send its body to the end.
        half = HTTPConnection("127.0.0.1", server.port)
        half.putrequest("POST", "/api/answer")
        half.putheader("Authorization", f"Bearer {server.token}")
        half.putheader("Content-Type", "application/json")
        half.putheader("Content-Length", "500")
        half.endheaders(b"{")
        until(busy)
        (os.killpg if to_group else os.kill)(server.process.pid, number)
        assert server.process.wait(PATIENCE_S) == 0
        until(lambda: is_gone(worker))
        status, found = asked.result()
        assert (status, len(found["problems"])) == (503, 1)
    assert (tmp_path / "stderr").read_text() == "Stop it with Ctrl-C.\n"


def test_a_server_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    with serving_one(tmp_path) as (server, worker), ThreadPoolExecutor() as threads:
        busy = is_busy(worker)
        asked = threads.submit(server.ask, LONG)
        until(busy)
        server.process.kill()
        until(lambda: is_gone(worker))
        assert asked.exception() is not None


def test_a_killed_worker_costs_one_question_at_most(tmp_path: Path) -> None:
    with serving_one(tmp_path) as (server, worker), ThreadPoolExecutor() as threads:
        busy = is_busy(worker)
        asked = threads.submit(server.ask, LONG)
        until(busy)
        worker.kill()
        status, found = asked.result()
        assert (status, len(found["problems"])) == (503, 1)
        assert server.ask(QUESTION)[0] == 200
        (idle,) = psutil.Process(server.process.pid).children(recursive=True)
        idle.kill()
        until(lambda: is_gone(idle))
        assert server.ask(QUESTION)[0] == 200
    assert "Traceback" not in (tmp_path / "stderr").read_text()


def test_work_ends_when_its_client_leaves(tmp_path: Path) -> None:
    with serving_one(tmp_path) as (server, worker):
        busy = is_busy(worker)
        connection = HTTPConnection("127.0.0.1", server.port)
        connection.request("POST", "/api/answer", json.dumps(LONG), {
            "Authorization": f"Bearer {server.token}", "Content-Type": "application/json",
        })  # fmt: skip
        until(busy)
        connection.close()
        until(lambda: is_gone(worker))
        assert server.ask(QUESTION)[0] == 200
    assert "Traceback" not in (tmp_path / "stderr").read_text()


def test_a_question_that_fails_leaves_others_answered() -> None:
    good = {"question": json.dumps({**QUESTION, "timeline": False})}
    # No client can send it: the planner fails on it with a TypeError.
    bad = {"question": 5}

    async def ask() -> list[Reply]:
        workers = Workers(most=1, limit_s=PATIENCE_S)
        try:
            replies = [await workers.reply(task) for task in (bad, good)]
            for worker in psutil.Process().children():
                worker.suspend()  # as good as a question that never ends
            workers.limit_s = 0.5
            replies.append(await workers.reply(good))
            workers.limit_s = PATIENCE_S
            return [*replies, await workers.reply(good)]
        finally:
            await workers.close()

    replies = asyncio.run(ask())
    assert [one.status for one in replies] == [500, 200, 503, 200]
    assert "TypeError" in replies[0].text
    assert "0.5 s" in replies[2].text
