"""Overhead of the trainer: per rank and step, per node, and between ranks."""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.scale.cost import Case, Measured, Part, rows, timed

REPEATS, POLLS = 2000, 100
# Sections of a step without a log line or a save: see shardwise.train.loop.
SECTIONS = 3


def measure(what: str, count: int = 1) -> dict[str, float]:
    measures: dict[str, Any] = {
        "rank": _rank,
        "node": _node,
        "agree": _agree,
    }
    found: dict[str, float] = measures[what](count)
    return found


def _rank(_: int) -> dict[str, float]:
    """Cost of one rank's heartbeats and of a metrics line."""
    from shardwise.spec.train import RestartSettings
    from shardwise.train import heartbeat
    from shardwise.train.agree import AGREEMENT_BYTES
    from shardwise.train.metrics import JsonLines

    with tempfile.TemporaryDirectory() as folder:
        os.environ[heartbeat.FOLDER] = folder
        heartbeat.start_heartbeat(0, RestartSettings())
        start = time.process_time()
        for step in range(REPEATS):
            heartbeat.report(step=step)
            for _ in range(SECTIONS):
                with heartbeat.section("step"):
                    pass
        beats = (time.process_time() - start) / REPEATS
        shared = Path(folder, "rank-0").stat().st_size
        lines = Path(folder, "metrics.jsonl")
        tracker = JsonLines(lines)
        values = {f"value_{number}": number + 0.123456789 for number in range(12)}
        start = time.process_time()
        for step in range(REPEATS):
            tracker.log(step, values)
        line = (time.process_time() - start) / REPEATS
        tracker.close()
        written = lines.stat().st_size / REPEATS
    return {
        "beats_s": beats,
        "beat_bytes": shared,
        "line_s": line,
        "line_bytes": written,
        "agreed_bytes": AGREEMENT_BYTES,
    }


def _node(ranks: int) -> dict[str, float]:
    """Cost of one poll of a node's hang detector when all ranks make progress."""
    from shardwise.spec.train import RestartSettings
    from shardwise.train import heartbeat
    from shardwise.train.hang_detector import HangDetector

    with tempfile.TemporaryDirectory() as folder:
        os.environ[heartbeat.FOLDER] = folder
        for rank in range(ranks):
            heartbeat.start_heartbeat(rank, RestartSettings())
        detector = HangDetector(Path(folder))
        start = time.process_time()
        for _ in range(POLLS):
            hang, doomed = detector.poll()
            assert hang is None
            assert not doomed
        took = time.process_time() - start
        assert len(detector.heartbeats()) == ranks
    return {"look_s": took / POLLS}


def _agree(ranks: int) -> dict[str, float]:
    """Time of one agreement between local processes, and the sockets it keeps open."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    processes = [
        context.Process(target=_settle, args=(rank, ranks, port, results)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found: dict[str, float] = results.get(timeout=300)
    for process in processes:
        process.join()
    return found


def _settle(rank: int, ranks: int, port: int, results: Any) -> None:
    import torch
    import torch.distributed as dist

    from shardwise.train.agree import Agreement

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    before = _sockets()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=ranks)  # fmt: skip
    one = _sockets()
    dist.new_group(backend="gloo")  # a second group, as checkpoint saves create one
    two = _sockets()
    taken = []
    for step in range(200):
        start = time.perf_counter()
        assert Agreement(step, [], stop=False).result().tokens == 0
        taken.append(time.perf_counter() - start)
    dist.barrier()
    if rank == ranks - 1:  # not rank 0, where the store listens
        results.put({
            "agree_s": statistics.median(taken[20:]),
            "group_sockets": two - one,
            "first_sockets": one - before,
        })  # fmt: skip
    dist.destroy_process_group()


def _sockets() -> int:
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(link).startswith("socket:")
        except OSError:
            continue
    return found


def table(found: list[Measured]) -> str:
    of = {what: [one for one in found if one.case["what"] == what] for what in ("rank", "node")}
    agreed = [one for one in found if one.case["what"] == "agree"]
    one = of["rank"][0]
    text = rows(
        ["per rank and step", "CPU time", "bytes"],
        [
            ["heartbeats", timed(one, "beats_s"), f"{one['beat_bytes']:.0f}, in shared memory"],
            ["agreement", "see below", f"{one['agreed_bytes']:.0f}, all-reduced"],
            ["metrics line (rank 0, in logged steps)", timed(one, "line_s"),
             f"{one['line_bytes']:.0f}"],
        ],
    )  # fmt: skip
    text += "\n" + rows(
        [
            "ranks per node",
            "one poll of the hang detector",
            "share of a core at 10 polls per second",
        ],
        [
            [str(n.case["count"]), timed(n, "look_s"), f"{n['look_s'] * 1000:.1f} %"]
            for n in of["node"]
        ],
    )
    text += "\n" + rows(
        [
            "processes on two cores",
            "one agreement, nothing else running (wall-clock)",
            "sockets per rank and group",
        ],
        [[str(a.case["count"]), timed(a, "agree_s"), f"{a['group_sockets']:.0f}"] for a in agreed],
    )
    return text + (
        "\nWith more processes than free cores, an agreement waits for a core. Those times say"
        " little about a network.\n"
    )


def _cases(nodes: tuple[int, ...], ranks: tuple[int, ...]) -> list[Case]:
    found: list[Case] = [{"what": "rank"}]
    found += [{"what": "node", "count": n} for n in nodes]
    return found + [{"what": "agree", "count": n} for n in ranks]


PART = Part(
    "Trainer",
    _cases((1, 8, 64), (2, 4, 8)),
    _cases((8, 64), (2, 3)),
    measure,
    table,
)
