"""Overlap: a profiler trace shows all collectives, and how much of them compute hides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardwise.accept import workload
from shardwise.accept.line import Line, judged, not_run
from shardwise.spec.run import write_run

if TYPE_CHECKING:
    from shardwise.accept.bench import Bench

RECORDED, HIDDEN = "collectives recorded", "communication hidden"
# Share of communication; without overlap it is 0.
MIN_OVERLAP = 0.10
SHARDED = ("all_gather", "reduce_scatter")


def check_overlap(bench: Bench) -> Iterator[Line]:
    """Profile a few steps of the sharded layout and read the traces of all ranks."""
    at_least = f"≥ {MIN_OVERLAP:.0%}"
    if bench.machine.processes == 1:
        yield not_run(RECORDED, "as predicted", "one device sends nothing")
        yield not_run(HIDDEN, at_least, "one device sends nothing")
        return
    run = workload.describe(bench.cluster(), workload.sharded(bench.machine.processes))
    folder = bench.new_folder("profile")
    folder.mkdir()
    settings = run.train.but(folder=str(folder / "runs")) if run.train is not None else None
    (folder / "run.toml").write_text(write_run(run._replace(train=settings)))
    processes = str(bench.machine.processes)
    file = str(folder / "run.toml")
    bench.say("profile zero3")
    printed = bench.command("profile", file, "--nproc", processes, "--name", "it", "--json")
    found = json.loads(printed)
    yield _recorded(found)
    ranks = found["trace"]["ranks"]
    hidden = sum(rank["overlapped_ns"] for rank in ranks)
    share = hidden / max(1, sum(rank["communication_ns"] for rank in ranks))
    seen = f"{share:.1%}"
    if bench.machine.is_cpu:
        yield not_run(HIDDEN, at_least, "only a GPU has streams that overlap", seen, overlap=share)
        return
    reason = "communication and compute take turns"
    yield judged(HIDDEN, at_least, seen, share >= MIN_OVERLAP, reason, overlap=share)


def _recorded(found: dict[str, Any]) -> Line:
    """Compare the calls that every rank's trace shows with the predicted ones."""
    predicted = {
        op: sum(one["calls"] for one in found["predicted"]["traffic"] if one["op"] == op)
        for op in SHARDED
    }
    seen = [
        {
            op: round(sum(one["calls"] for one in rank["collectives"] if one["operation"] == op))
            for op in SHARDED
        }
        for rank in found["trace"]["ranks"]
    ]
    different = [calls for calls in seen if calls != predicted]
    return judged(
        RECORDED, _words(predicted), _words((different or seen)[0]), not different,
        f"{len(different)} of {len(seen)} traces show other calls", **predicted,
    )  # fmt: skip


def _words(calls: dict[str, int]) -> str:
    return ", ".join(f"{number} {op.replace('_', '-')}" for op, number in calls.items())
