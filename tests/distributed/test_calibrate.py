"""`shardwise calibrate` on real processes: what it writes is what it measured, and is used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.spec.lookup import find_cluster
from tests.command import shardwise

MODEL = """
[model]
name = "small"
family = "llama"
layers = 4
hidden = 128
heads = 4
ffn = 344
vocab = 512
max_positions = 64

[job]
seq_len = 64

[strategy]
kind = "zero3"
param_dtype = "fp32"
micro_batch = 4
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("calibrate")
    # The machine may be busy with other tests.
    words = ("calibrate", "--nproc", "2", "-o", "cluster.toml", "--force", "--json")
    done = shardwise(*words, folder=folder)
    assert done.returncode == 0, done.stderr
    assert "Measuring matmul" in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return folder, found


@pytest.mark.timing
def test_what_is_written_is_what_was_measured(measured: tuple[Path, dict[str, Any]]) -> None:
    folder, found = measured
    cluster = find_cluster(str(folder / "cluster.toml"))
    assert cluster.model_dump(mode="json", exclude_none=True) == found["cluster"]
    assert (cluster.nodes, cluster.devices_per_node) == (1, 2)
    assert cluster.calibration is not None
    assert "2 CPU over gloo" in cluster.calibration.source
    machine = found["machine"]
    assert [one["operation"] for one in machine["collectives"]] == [
        "all_gather", "reduce_scatter", "all_reduce", "all_to_all"
    ]  # fmt: skip
    # A collective inside a block costs at least its dispatch, as every operation does.
    assert machine["exchange_s"] > machine["launch_s"]
    for one in machine["collectives"]:
        assert one["members"] == 2
        times = [message["median_s"] for message in one["messages"]]
        assert times[-1] > times[0]
        assert one["rate_interval"][0] < one["rate"] < one["rate_interval"][1]
    gathered, exchanged = (machine["collectives"][place]["rate"] for place in (0, -1))
    assert cluster.device.link_bandwidth == pytest.approx(gathered, rel=1e-3)
    speedup = cluster.calibration.all_to_all_speedup
    assert speedup == pytest.approx(exchanged / gathered, rel=1e-3)


@pytest.mark.timing
def test_a_product_takes_what_was_measured(measured: tuple[Path, dict[str, Any]]) -> None:
    """Timed by hand: one process alone is as fast, or faster where two share a core."""
    _, found = measured
    rates = {(p["dtype"], p["edge"]): p["flops_per_s"] for p in found["machine"]["matmul"]}
    a = torch.randn(512, 512)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    best = min(_seconds(a) for _ in range(20))
    torch.set_num_threads(before)
    assert 0.2 < rates["fp32", 512] / (2 * 512**3 / best) < 2.0


def _seconds(a: torch.Tensor) -> float:
    begin = time.perf_counter()
    a @ a
    return time.perf_counter() - begin


@pytest.mark.timing
def test_what_was_written_makes_step_times_of_cpus_known(
    measured: tuple[Path, dict[str, Any]],
) -> None:
    folder, _ = measured
    (folder / "run.toml").write_text('cluster = "cluster.toml"\n' + MODEL)
    planned = shardwise("plan", "run.toml", "--global-batch", "1024", "--json", folder=folder)
    assert planned.returncode == 0, planned.stderr
    assert json.loads(planned.stdout)["kind"] == "predicted"
    trained = shardwise(
        "train", "run.toml", "--nproc", "2", "--steps", "10", "--json", folder=folder
    )
    assert trained.returncode == 0, trained.stderr
    result = json.loads(trained.stdout)
    predicted, real = (result[kind]["time"]["step_s"] for kind in ("predicted", "measured"))
    # Never trained on: within a factor, on a machine that may be busy.
    assert 1 / 3 < predicted / real < 3


@pytest.fixture
def busy_cores() -> Iterator[None]:
    """Every core computes for somebody else."""
    work = [sys.executable, "-c", "while True: pass"]
    with ExitStack() as started:
        for _ in range(os.cpu_count() or 1):
            started.callback(started.enter_context(subprocess.Popen(work)).kill)
        yield


@pytest.mark.timing
@pytest.mark.usefixtures("busy_cores")
def test_a_machine_that_others_use_is_not_calibrated(tmp_path: Path) -> None:
    done = shardwise("calibrate", "--nproc", "2", "-o", "cluster.toml", "--json", folder=tmp_path)
    assert done.returncode == 1, done.stderr
    assert not list(tmp_path.iterdir())
    doubts = {one["kind"]: one for one in json.loads(done.stdout)["doubts"]}
    assert doubts["load"]["value"] > 0.9 > doubts["load"]["limit"]
    # The answer of rank 0 is no failure of its process.
    assert "Last lines" not in done.stderr


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["-o", "cluster.json"], "must end in .toml"),
        (["--device", "H1000"], "unknown device"),
        (["--network", "fast"], "400Gbps"),
        (["--from-run", "x", "--nproc", "2"], "remove --nproc"),
    ],
)
def test_what_cannot_be_meant_is_said_before_anything_is_measured(
    tmp_path: Path, words: list[str], why: str
) -> None:
    done = shardwise("calibrate", *words, folder=tmp_path)
    assert done.returncode == 2
    assert why in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_a_data_sheet_of_what_is_not_here_is_refused(tmp_path: Path) -> None:
    done = shardwise("calibrate", "--device", "H100-SXM", folder=tmp_path)
    assert (done.returncode, "no GPU" in done.stderr) == (2, True)
