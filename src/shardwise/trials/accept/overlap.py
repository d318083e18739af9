"""Overlap: a profiler trace shows all collectives, and how much of them compute hides."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shardwise.observe.against import traffic_terms
from shardwise.observe.diagnosis.verdicts import health_of
from shardwise.observe.rules import Rules
from shardwise.observe.run_folder import traces_in
from shardwise.observe.summary import Summary, summarise
from shardwise.spec.run import write_run
from shardwise.step.profile import StepProfile, read_profile
from shardwise.trials.accept import workload
from shardwise.trials.accept.line import Line, judge, not_run

if TYPE_CHECKING:
    from shardwise.trials.accept.bench import Bench

RECORDED, HIDDEN = "collectives recorded", "communication hidden"
# Least share of communication that compute must hide; without overlap it is 0.
MIN_OVERLAP = 0.10
SHARDED = ("all-gather", "reduce-scatter")


def check_overlap(bench: Bench) -> Iterator[Line]:
    """Profile a few steps of the sharded layout, and read the traces of all ranks."""
    at_least = f"≥ {MIN_OVERLAP:.0%}"
    if bench.machine.processes == 1:
        yield not_run(RECORDED, "as predicted", "one device sends nothing")
        yield not_run(HIDDEN, at_least, "one device sends nothing")
        return
    processes, folder = str(bench.machine.processes), bench.new_folder("profile")
    folder.mkdir()
    layout, file = workload.sharded(bench.machine.processes), folder / "run.toml"
    run = workload.describe(bench.cluster(), layout, folder=str(folder / "runs"))
    file.write_text(write_run(run))
    bench.say("profile zero3")
    printed = bench.command("profile", str(file), "--nproc", processes, "--name", "it", "--json")
    found = json.loads(printed)
    summary = summarise(traces_in(Path(found["traces"])))
    yield compare_recorded(read_profile(found["predicted"], "predicted"), summary)
    share = health_of(summary, Rules().thresholds).overlap or 0.0
    seen = f"{share:.1%}"
    if bench.machine.is_cpu:
        yield not_run(HIDDEN, at_least, "only a GPU has streams that overlap", seen, overlap=share)
        return
    reason = "communication and compute take turns"
    yield judge(HIDDEN, at_least, seen, share >= MIN_OVERLAP, reason, overlap=share)


def compare_recorded(predicted: StepProfile, summary: Summary) -> Line:
    """A line that compares the all-gathers and reduce-scatters in the traces with a prediction.

    It compares their calls and bytes on every rank.
    """
    terms = [
        term
        for rank in summary.ranks
        for term in traffic_terms(predicted.traffic, rank)
        # Small all-reduces of the trainer depend on the step.
        if term.name.startswith(SHARDED)
    ]
    different = [term for term in terms if round(term.second or 0) != term.first]
    calls = {term.name.partition(":")[0]: term for term in terms if term.unit == "calls"}
    return judge(
        RECORDED,
        ", ".join(f"{one.first:.0f} {name}" for name, one in calls.items()),
        ", ".join(f"{one.second:.0f} {name}" for name, one in calls.items()),
        bool(terms) and not different,
        "; ".join(f"{one.name}: {one.second:,.1f} recorded" for one in different) or "none",
        ranks=len(summary.ranks),
    )
