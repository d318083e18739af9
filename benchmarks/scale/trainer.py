"""Overhead of the trainer: per rank and step, per node, and between ranks."""

from __future__ import annotations

import math
import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from benchmarks.page import rows
from benchmarks.scale.cost import Case, Measured, Part, seconds, timed
from benchmarks.scale.latency import INTERFACE, slow_network

REPEATS, POLLS = 2000, 100
# Agreements, each of them once without and once with a step in which ranks only wait.
AGREED, STEP_S = 40, 0.1
# With a latency added to every hop, agreements take seconds and hardly differ.
AGREED_SLOWLY, LATENCY_MS = 8, 20
MODELLED = (64, 1024, 10_000, 100_000)
# Sections of a step without a log line or a save: see shardwise.trainer.loop.
SECTIONS = 3


def measure(
    what: str, count: int = 1, tree: bool = False, latency_ms: float = 0
) -> dict[str, float]:
    if what == "agree":
        with slow_network(latency_ms / 1e3) if latency_ms else nullcontext():
            return _agree(count, tree, slowly=latency_ms > 0)
    measures: dict[str, Any] = {"rank": _rank, "node": _node, "hosts": _hosts}
    found: dict[str, float] = measures[what](count)
    return found


def _rank(_: int) -> dict[str, float]:
    """Cost of one rank's heartbeats and of a metrics line."""
    from shardwise.launch import heartbeat
    from shardwise.spec.train import RestartSettings
    from shardwise.trainer.agree import AGREEMENT_BYTES
    from shardwise.trainer.metrics import JsonLines

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
    from shardwise.launch import heartbeat
    from shardwise.launch.hang_detector import HangDetector
    from shardwise.spec.train import RestartSettings

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


def _hosts(count: int) -> dict[str, float]:
    """CPU time of the rendezvous server per message of a host, while all of them train."""
    from shardwise.launch.membership import TRAINING, Membership, Post
    from shardwise.pytorch.channel import Secret

    secret = Secret("of a benchmark")
    host, server = (secret.channel(b"", b"", serves=serves) for serves in (False, True))
    now = [0.0]
    membership = Membership("server", lambda: now[0])
    now[0] += 100
    posts = [
        Post(f"{n:012d}", f"node-{n} (10.0.0.1)", "10.0.0.1", 8, (count,), 10.0)
        for n in range(count)
    ]
    for post in posts:
        membership.post(post)
    now[0] += 1
    for number, post in enumerate(posts):
        view = membership.post(post)
        posts[number] = post._replace(
            state=TRAINING, round=view.round, place=view.place, size=view.size
        )
        membership.post(posts[number])
    start = time.process_time()
    for post in posts:
        # As many of them in a second as hosts send.
        now[0] += max(1.0, view.post_after_s) / count
        line = host.seal(post.encode(1))
        number, read = Post.decode(server.open(line))
        view = membership.post(read, number)
        answer = server.seal(view.encode())
    took = time.process_time() - start
    assert view.ready
    assert view.training == count - 1
    return {
        "post_s": took / count,
        "bytes": len(line) + len(answer),
        "every_s": max(1.0, view.post_after_s),
    }


def _agree(ranks: int, tree: bool, *, slowly: bool) -> dict[str, float]:
    """Time of one agreement between local processes, their CPU time, and the sockets of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Torch is imported once, and the ranks are forked from there.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "shardwise.trainer.agree"])
    results, all_done = context.Queue(), context.Event()
    processes = [
        context.Process(target=_settle, args=(rank, ranks, port, tree, slowly, results, all_done))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found: list[dict[str, float]] = [results.get(timeout=300) for _ in processes]
    all_done.set()
    for process in processes:
        process.join()
    return {
        **{key: max(one[key] for one in found) for key in found[0]},
        "all_cpu_s": sum(one["cpu_s"] for one in found),
    }


def _settle(
    rank: int, ranks: int, port: int, tree: bool, slowly: bool, results: Any, all_done: Any
) -> None:
    import torch
    import torch.distributed as dist

    from shardwise.engine.rank_tree import shared_tree
    from shardwise.pytorch.device import connect_when_needed
    from shardwise.trainer.agree import Agreement

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE if slowly else "lo"
    if tree:
        connect_when_needed()
    before = _sockets()
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank,
                            world_size=ranks)  # fmt: skip
    shared_tree(one_group=1 if tree else ranks)
    count = AGREED_SLOWLY if slowly else AGREED
    at_once, steps = [], []
    # The first ones connect ranks.
    for step in range(-2, count):
        if step == 0:
            begun = time.process_time()
        start = _common_start(ranks) if slowly else time.time()
        assert Agreement(step, [], stop=False).result().tokens == 0
        at_once.append(time.time() - start)
    cpu_s = (time.process_time() - begun) / count
    # Whole steps: a rank that began earlier waits for the others, which delays nobody.
    for step in range(0 if slowly else count):
        start = time.perf_counter()
        agreement = Agreement(step, [], stop=False)
        time.sleep(STEP_S)
        agreement.result()
        steps.append(time.perf_counter() - start - STEP_S)
    sockets = _sockets() - before
    results.put({
        "agree_s": statistics.median(at_once[2 + count // 4 :]),
        "exposed_s": statistics.median(steps[count // 4 :] or [0.0]),
        "cpu_s": cpu_s,
        # The store listens on rank 0, and has a socket for every rank.
        "sockets": sockets if rank else 0,
    })  # fmt: skip
    # Rank 0 has the store, which others need until they are done.
    all_done.wait()
    dist.destroy_process_group()


def _common_start(ranks: int) -> float:
    """Wait for a time that all ranks know; otherwise one agreement would overlap with the next."""
    period_s = 0.5 + 1.5 * ring_hops(ranks) * LATENCY_MS / 1e3
    start = (time.time() // period_s + 1) * period_s
    time.sleep(start - time.time())
    return start


def _sockets() -> int:
    found = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            found += os.readlink(link).startswith("socket:")
        except OSError:
            continue
    return found


def table(found: list[Measured]) -> str:
    kinds = ("rank", "node", "hosts")
    of = {what: [one for one in found if one.case["what"] == what] for what in kinds}
    every = [one for one in found if one.case["what"] == "agree"]
    agreed = [one for one in every if not one.case.get("latency_ms")]
    slowly = [one for one in every if one.case.get("latency_ms")]
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
            *("hosts", "one message to the rendezvous server", "bytes", "sent every"),
            "share of a core of the server",
        ],
        [
            [
                *(f"{m.case['count']:,}", seconds(m["post_s"]), f"{m['bytes']:.0f}"),
                seconds(m["every_s"]),
                f"{m.case['count'] * m['post_s'] / m['every_s']:.1%}".replace("%", " %"),
            ]
            for m in of["hosts"]
        ],
    )
    text += "\n" + rows(
        [
            *("processes on two cores", "groups", "one agreement (wall-clock)"),
            *("CPU time of all ranks", "added to a step of 100 ms", "sockets per rank (most)"),
        ],
        [
            [
                *(str(a.case["count"]), _groups(a), timed(a, "agree_s")),
                *(timed(a, "all_cpu_s"), timed(a, "exposed_s")),
                f"{a['sockets']:.0f}",
            ]
            for a in agreed
        ],
    )
    if slowly:
        text += "\n" + _model_error(slowly, hop_s(agreed))
    return text + "\n" + _modelled(hop_s(agreed))


def _groups(one: Measured) -> str:
    return "three levels" if one.case.get("tree") else "one"


def hop_s(agreed: list[Measured]) -> float:
    """Time of a hop between two processes, which do not wait for a core."""
    (two,) = (a for a in agreed if a.case["count"] == 2)
    return two["agree_s"] / ring_hops(2)


def _model_error(slowly: list[Measured], hop: float) -> str:
    """Compare the number of hops with agreements in which each hop takes long."""
    body = []
    for one in slowly:
        ranks, latency_s = one.case["count"], one.case["latency_ms"] / 1e3
        hops = tree_hops(ranks) if one.case.get("tree") else ring_hops(ranks)
        predicted = hops * (latency_s + hop)
        body.append([
            *(str(ranks), _groups(one), str(hops), seconds(predicted), timed(one, "agree_s")),
            f"{one['agree_s'] / predicted - 1:+.0%}".replace("%", " %"),
        ])  # fmt: skip
    return rows(
        [
            *(f"processes, {LATENCY_MS} ms per hop", "groups", "hops", "predicted"),
            *("measured", "measured against predicted"),
        ],
        body,
    )


def ring_hops(ranks: int) -> int:
    """Messages in sequence of one all-reduce: a ring that is passed through twice."""
    return 2 * (ranks - 1)


def tree_hops(ranks: int) -> int:
    """The same of three levels: a gather and a broadcast in each.

    In a gather, the first rank says that it is ready, and all others send: two hops. In a
    broadcast, a binomial tree, all others wait already.
    """
    from shardwise.engine.rank_tree import level_width

    width = level_width(ranks)
    top = math.ceil(ranks / width**2)
    return 3 * 2 + sum(math.floor(math.log2(size)) for size in (width, width, top))


def _modelled(hop: float) -> str:
    """Times for many ranks."""
    from shardwise.engine.rank_tree import level_width

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


def _cases(
    nodes: tuple[int, ...],
    hosts: tuple[int, ...],
    ranks: tuple[int, ...],
    slow_ranks: tuple[int, ...] = (),
) -> list[Case]:
    found: list[Case] = [{"what": "rank"}]
    found += [{"what": "node", "count": n} for n in nodes]
    found += [{"what": "hosts", "count": n} for n in hosts]
    found += [{"what": "agree", "count": n} for n in ranks]
    found += [{"what": "agree", "count": n, "tree": True} for n in ranks if n > 2]
    return found + [
        {"what": "agree", "count": n, "tree": tree, "latency_ms": LATENCY_MS}
        for n in slow_ranks
        for tree in (False, True)
    ]


PART = Part(
    "Trainer",
    _cases((1, 8, 64), (8, 1000, 12_500), (2, 8, 27, 64), (8, 27, 64)),
    _cases((8, 64), (8, 1000), (2, 3)),
    measure,
    table,
)
