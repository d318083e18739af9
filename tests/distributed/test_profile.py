"""Profiled runs: real processes, and traces that agree with what was counted and predicted."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shardwise.observe.diagnosis.stragglers import Straggler
from shardwise.observe.diagnosis.verdicts import verdicts_of
from shardwise.observe.summary import summarise
from tests.command import shardwise
from tests.distributed.runs import FOREIGN, lines, train, write

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed import sources

LATE = """
cluster = "1x4xCPU"
model = "tests.distributed.sources:late_model"
job = { seq_len = 64 }
strategy = { kind = "zero3", micro_batch = 8, param_dtype = "fp32" }
data = { source = "tests.distributed.sources:late" }

[train]
steps = %d
measure = false
trackers = []
profile = { after = %d, steps = %d, every = %d, keep = 0 }
"""
SLOW_RANK = 2
CASES = list(product(("data", "host", "compute"), (0.2, 0.5, 2.0)))


def windows(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs" / "it" / "traces").iterdir())


def traces(folder: Path, step: int) -> list[Path]:
    return sorted((folder / "runs" / "it" / "traces" / f"step-{step:06}").glob("*.json.gz"))


def names(trace: Path) -> Counter[str]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return Counter(event["name"] for event in events if event.get("ph") == "X")


def by_operation(traffic: list[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Calls and bytes of a StepProfile's traffic, whatever the groups."""
    found: dict[str, tuple[int, int]] = {}
    for one in traffic:
        calls, total = found.get(one["op"], (0, 0))
        found[one["op"]] = (calls + one["calls"], total + one["bytes"])
    return {op: both for op, both in found.items() if both[0]}


def assert_traffic_agrees(folder: Path, step: int, ranks: int, steps: int = 1) -> None:
    """The trace of every rank, the counter and the prediction tell the same calls and bytes."""
    run = folder / "runs" / "it"
    predicted = by_operation(json.loads((run / "prediction.json").read_text())["traffic"])
    counted = by_operation(json.loads((run / "measurement.json").read_text())["traffic"])
    assert counted == predicted
    summary = summarise(traces(folder, step))
    assert [rank.rank for rank in summary.ranks] == list(range(ranks))
    for rank in summary.ranks:
        assert len(rank.steps) == steps
        traced = {
            one.operation.replace("-", "_"): (one.calls, one.moved_bytes)
            for one in rank.collectives
        }
        assert traced == {op: (steps * calls, steps * n) for op, (calls, n) in counted.items()}


@pytest.mark.nightly
def test_windows_that_repeat_become_a_curve(tmp_path: Path) -> None:
    steps, first, every = 28, 6, 4
    settings = f"[train.profile]\nafter = {first}\nevery = {every}\nkeep = 2"
    # Two micro-batches a step, and enough work that an analysis ends before the run does.
    file = write(tmp_path, steps=steps, log_every=1, micro_batch=8, train=settings)
    file.write_text(file.read_text().replace("global_batch = 256", "global_batch = 1024"))
    done = train(file, "--nproc", "2")
    assert "profiler_start" not in done.stderr
    assert "Warning" not in done.stderr
    began = list(range(first + 1, steps + 1, every))
    assert windows(tmp_path) == [f"step-{step:06}" for step in began[-2:]]

    found = lines(tmp_path)
    profiled = [line for line in found if "profile_step" in line]
    assert len(profiled) >= 2
    # The last one may come after the last step; those that came too fast were left out.
    assert profiled[-1]["profile_step"] == began[-1]
    assert {line["profile_step"] for line in profiled} <= set(began)
    for line in profiled:
        parts = [line[f"profile_{part}"] for part in ("compute", "exposed", "idle")]
        assert all(0 < part < 1 for part in parts)
        assert sum(parts) <= 1
        assert 0 <= line["profile_overlap"] <= 1

    # Steps 1 to 5 are measured; around a profiled one, times say nothing about the run.
    timed = {line["step"] for line in found if "step_s" in line}
    disturbed = {step + near for step in began for near in (-1, 0, 1)}
    assert timed == set(range(6, steps + 1)) - disturbed

    last = traces(tmp_path, began[-1])
    assert [path.name for path in last] == ["rank0.json.gz", "rank1.json.gz"]
    seen = names(last[1])
    assert {name for name in seen if name.startswith("ProfilerStep")} == {
        f"ProfilerStep#{began[-1]}"
    }
    assert seen["shardwise::data"] == 1
    assert seen["shardwise::micro_batch (sync)"] == 2
    for step in began[-2:]:
        assert_traffic_agrees(tmp_path, step, ranks=2)


def test_one_command_profiles_and_tells(tmp_path: Path) -> None:
    file = write(tmp_path, kind="zero2", micro_batch=4, log_every=20)
    done = shardwise(
        *("train", str(file), "--profile", "3", "--nproc", "2", "--name", "it"), folder=tmp_path
    )
    assert done.returncode == 0, done.stderr
    shown = done.stdout
    assert "steps 7 to 9" in shown
    assert "runs/it/traces/step-000007" in shown
    assert "average of 3 steps" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    seen = names(traces(tmp_path, 7)[0])
    assert {name for name in seen if name.startswith("ProfilerStep")} == {
        f"ProfilerStep#{step}" for step in (7, 8, 9)
    }
    assert_traffic_agrees(tmp_path, 7, ranks=2, steps=3)


@pytest.mark.nightly
def test_hybrid_sharding_moves_what_was_predicted(tmp_path: Path) -> None:
    # Every second step is logged, which takes an all-reduce; neither step 3 nor step 9 is.
    settings = "trackers = []\n[train.profile]\nafter = 8\nsteps = 1"
    file = write(tmp_path, FOREIGN, source="equal", accumulate=1, train=settings)
    hybrid = file.read_text().replace('"zero3", ', '"zero3", shard = 2, replicate = 2, ')
    file.write_text(hybrid.replace("1x2xCPU", "1x4xCPU"))
    train(file, "--nproc", "4")
    assert_traffic_agrees(tmp_path, 9, ranks=4)


def profiled_runs(folder: Path, cases: list[tuple[str, float]]) -> list[Path]:
    """Traces of four ranks, a folder for each case, in which one is late by a share of a step.

    A case is the share, and where: "data" comes late, the "host" sleeps in the forward, or there is
    more to "compute".
    """
    moments = [sources.LATE_FIRST + sources.LATE_EVERY * case for case in range(len(cases))]
    steps = moments[-1] + sources.LATE_STEPS + 2
    file = folder / "run.toml"
    file.write_text(LATE % (steps, sources.LATE_FIRST, sources.LATE_STEPS, sources.LATE_EVERY))
    told = ",".join(f"{kind}:{share}" for kind, share in cases)
    done = shardwise(
        "train", str(file), "--nproc", "4", "--name", "it", folder=folder,
        SLOW_RANK=str(SLOW_RANK), SLOW_CASES=told,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [folder / "runs" / "it" / "traces" / f"step-{step + 1:06}" for step in moments]


@pytest.fixture(scope="module")
def late_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, float], Path]:
    folders = profiled_runs(tmp_path_factory.mktemp("late"), CASES)
    return dict(zip(CASES, folders, strict=True))


@pytest.mark.timing
@pytest.mark.parametrize("case", CASES)
def test_a_late_rank_is_named_with_its_cause(
    late_runs: dict[tuple[str, float], Path], case: tuple[str, float]
) -> None:
    """Four processes on two cores are noisy: a fifth of a step is named, two steps come first."""
    found = sorted(late_runs[case].glob("*.json.gz"))
    assert [path.name for path in found] == [f"rank{rank}.json.gz" for rank in range(4)]
    verdicts = verdicts_of(summarise(found))
    kind, share = case
    (named,) = [verdict for verdict in verdicts if verdict.cause == "straggler"]
    assert isinstance(named, Straggler)
    assert (named.ranks, named.reason) == ((f"rank {SLOW_RANK}",), kind)
    if share > 0.5:
        assert verdicts[0] is named
