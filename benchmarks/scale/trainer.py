"""Overhead of the trainer: per rank and step, per node, and between ranks."""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.scale.cost import Case, Measured, Part, rows, seconds, timed

REPEATS, POLLS = 2000, 100
# Agreements, each of them once without and once with a step in which ranks only wait.
AGREED, STEP_S = 40, 0.1
MODELLED = (64, 1024, 10_000, 100_000)
# Sections of a step without a log line or a save: see shardwise.train.loop.
SECTIONS = 3


def measure(what: str, count: int = 1, tree: bool = False) -> dict[str, float]:
    if what == "agree":
        return _agree(count, tree)
    measures: dict[str, Any] = {"rank": _rank, "node": _node}
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


def _agree(ranks: int, tree: bool = False) -> dict[str, float]:
    """Time of one agreement between local processes, and the sockets of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Torch is imported once, and the ranks are forked from there.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "shardwise.train.agree"])
    results = context.Queue()
    processes = [
        context.Process(target=_settle, args=(rank, ranks, port, tree, results))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found: list[dict[str, float]] = [results.get(timeout=300) for _ in processes]
    for process in processes:
        process.join()
    return {key: max(one[key] for one in found) for key in found[0]}


def _settle(rank: int, ranks: int, port: int, tree: bool, results: Any) -> None:
    import torch
    import torch.distributed as dist

    from shardwise.engine.device import connect_when_needed
    from shardwise.engine.rank_tree import shared_tree
    from shardwise.train.agree import Agreement

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if tree:
        connect_when_needed()
    before = _sockets()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=ranks)  # fmt: skip
    shared_tree(one_group=1 if tree else ranks)
    at_once, after_step = [], []
    for step in range(AGREED):
        start = time.perf_counter()
        assert Agreement(step, [], stop=False).result().tokens == 0
        at_once.append(time.perf_counter() - start)
    for step in range(AGREED):
        agreement = Agreement(step, [], stop=False)
        time.sleep(STEP_S)
        start = time.perf_counter()
        agreement.result()
        after_step.append(time.perf_counter() - start)
    sockets = _sockets() - before
    results.put({
        "agree_s": statistics.median(at_once[AGREED // 4 :]),
        "exposed_s": statistics.median(after_step[AGREED // 4 :]),
        # The store listens on rank 0, and has a socket for every rank.
        "sockets": sockets if rank else 0,
    })  # fmt: skip
    dist.barrier()
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
            *("processes on two cores", "groups", "one agreement (wall-clock)"),
            *("left after a step of 100 ms", "sockets per rank (most)"),
        ],
        [
            [
                str(a.case["count"]),
                "three levels" if a.case.get("tree") else "one",
                timed(a, "agree_s"),
                timed(a, "exposed_s"),
                f"{a['sockets']:.0f}",
            ]
            for a in agreed
        ],
    )
    return text + "\n" + _modelled(agreed)


def ring_hops(ranks: int) -> int:
    """Messages in sequence of one all-reduce: a ring that is passed through twice."""
    return 2 * (ranks - 1)


def tree_hops(ranks: int) -> int:
    """The same of three levels: two reductions, each a ring and a message to the first rank; an
    all-reduce at the top; two broadcasts, each a binary tree.
    """
    from shardwise.engine.rank_tree import level_width

    width = level_width(ranks)
    top = math.ceil(ranks / width**2)
    return 2 * width + ring_hops(top) + 2 * math.ceil(math.log2(width))


def _modelled(agreed: list[Measured]) -> str:
    """Times for many ranks, from the hop time of two, which do not wait for a core."""
    from shardwise.engine.rank_tree import level_width

    (two,) = (a for a in agreed if a.case["count"] == 2)
    hop = two["agree_s"] / ring_hops(2)
    body = []
    for ranks in MODELLED:
        width = level_width(ranks)
        body.append([
            f"{ranks:,}", f"{ring_hops(ranks):,}", f"*{seconds(hop * ring_hops(ranks))}*",
            f"{tree_hops(ranks):,}", f"*{seconds(hop * tree_hops(ranks))}*",
            f"{ranks:,}", f"{width} to {3 * width}",
        ])  # fmt: skip
    text = rows(
        [
            *("ranks", "hops, one group", "time, one group", "hops, three levels"),
            *("time, three levels", "sockets, one group", "sockets, three levels"),
        ],
        body,
    )
    return text + (
        f"\nA hop took {seconds(hop)} between two processes. With more processes than cores, each"
        " hop also waits for a core.\n"
    )


def _cases(nodes: tuple[int, ...], ranks: tuple[int, ...]) -> list[Case]:
    found: list[Case] = [{"what": "rank"}]
    found += [{"what": "node", "count": n} for n in nodes]
    found += [{"what": "agree", "count": n} for n in ranks]
    return found + [{"what": "agree", "count": n, "tree": True} for n in ranks if n > 2]


PART = Part(
    "Trainer",
    _cases((1, 8, 64), (2, 8, 64)),
    _cases((8, 64), (2, 3)),
    measure,
    table,
)
