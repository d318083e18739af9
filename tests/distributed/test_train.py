"""`shardwise train` as a user starts it: real processes, real files, real signals."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from shardwise.observe.memory.read import read_memory
from shardwise.spec.quantity import show_gib
from shardwise.spec.run import read_run
from shardwise.step.profile import SCHEMA
from tests.command import COMMAND, PATIENCE_S, environment, shardwise
from tests.distributed.launch import torchrun
from tests.distributed.runs import FOREIGN, lines, losses, train, write
from tests.distributed.workers import Workers
from tests.gate import first_in_gate
from tests.terminal import left_of, on_terminal

pytest.importorskip("torch")
pytest.importorskip("transformers")
from shardwise.trials.doctor.plan_checks import check_plan
from tests.distributed.train_run import run_saving_at_once, run_toml


class Ended(NamedTuple):
    """A run that has ended, and what it printed."""

    folder: Path
    printed: subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Ended:
    folder = tmp_path_factory.mktemp("ended")
    (folder / "text.txt").write_text("to be or not to be, that is the question. " * 200)
    file = write(folder, data='[data]\npath = "text.txt"', steps=30, log_every=5)
    return Ended(folder, train(file, "--nproc", "2"))


def test_a_run_ends_with_prediction_against_measurement(ended: Ended) -> None:
    there, done = ended
    shown, stages = done.stdout, [s for s in done.stderr.splitlines() if s.endswith(" …")]
    # What happens before the first result, from this process and then from rank 0.
    assert stages[0] == "Importing torch …"
    assert stages.index("Building the model …") < stages.index("Reading data …")
    assert (stages[-1], len(set(stages))) == ("First step …", len(stages))
    folder = there / "runs" / "it"
    predicted = json.loads((folder / "prediction.json").read_text())
    measured = json.loads((folder / "measurement.json").read_text())
    assert (predicted["provenance"]["kind"], measured["provenance"]["kind"]) == (
        "predicted",
        "measured",
    )
    assert predicted["schema"] == measured["schema"] == SCHEMA

    # Three blocks and a root: 7 gathers and 4 reductions; two small all-reduces of the trainer,
    # 40 bytes to agree on the next step and a norm for each of 3 x 9 + 3 tensors.
    found = {t["op"]: (t["calls"], t["bytes"]) for t in measured["traffic"]}
    assert {op: calls for op, (calls, _) in found.items()} == {
        "all_gather": 7,
        "reduce_scatter": 4,
        "all_reduce": 2,
    }
    assert found["all_reduce"][1] == 40 + 4 * (3 * 9 + 3)
    block = 4 * 64 * 64 + 3 * 64 * 96 + 2 * 64
    root = 2 * 256 * 64 + 64
    assert found["all_gather"][1] == 4 * (root + 2 * 3 * block)
    assert found["reduce_scatter"][1] == 4 * (root + 3 * block)
    assert measured["memory"]["terms"]["parameters"] == 4 * (root + 3 * block) // 2
    assert measured["memory"]["terms"]["optimizer"] == 2 * 4 * (root + 3 * block) // 2
    peak = measured["memory"]["peak_allocated_bytes"]
    assert predicted["memory"]["peak_allocated_bytes"] == pytest.approx(peak, rel=0.03)
    (memory,) = read_memory(folder)
    assert memory.peak.allocated_bytes == peak
    assert {one.category: one.bytes for one in memory.categories} == measured["memory"]["terms"]
    assert memory.leak.found is False
    assert measured["throughput"]["tokens_per_s"] == pytest.approx(
        256 / measured["time"]["step_s"], rel=1e-6
    )
    assert "mfu" not in measured["throughput"]  # the peak of this CPU is not known

    assert "Predicted peak" in shown
    assert "exact" in shown
    assert all(len(line) <= 80 for line in shown.splitlines())
    assert losses(there)[-1] < 2.0 < losses(there)[0]
    assert read_run(folder / "run.toml").resolved().strategy.shard == 2
    assert json.loads((folder / "environment.json").read_text())["versions"]["torch"]
    values = json.loads((folder / "run.json").read_text())["values"]
    assert values["step_s"] == measured["time"]["step_s"]
    assert values["tokens_per_s"] == measured["throughput"]["tokens_per_s"]
    last = lines(there)[-1]
    assert values["loss"] == last["loss"]
    assert last["step_s_p10"] <= last["step_s"] <= last["step_s_p90"]
    assert last["resident_peak_bytes"] >= last["resident_bytes"] > 0
    pytest.importorskip("tensorboard")
    assert list((folder / "tensorboard").iterdir())


def test_every_command_says_one_usable_memory(ended: Ended) -> None:
    """That of a process on this machine, which `train` predicts with."""
    file = ended.folder / "run.toml"
    prediction = ended.folder / "runs" / "it" / "prediction.json"
    trained = json.loads(prediction.read_text())["memory"]
    assert trained["capacity_bytes"] == psutil.virtual_memory().total // 2
    usable = trained["usable_bytes"]
    assert 0 < usable < trained["capacity_bytes"]
    said = {}
    for command, *options in (["estimate"], ["export", "--to", "accelerate"]):
        done = shardwise(command, str(file), *options, "--json", folder=ended.folder)
        assert done.returncode == 0, done.stderr
        said[command] = json.loads(done.stdout)
    assert said["estimate"]["memory"]["usable_bytes"] == usable
    exported = said["export"]["predicted"]
    assert [exported[kind]["usable_bytes"] for kind in ("run", "stack")] == [usable] * 2
    [headroom] = [one for one in check_plan(read_run(file)) if one.name == "memory headroom"]
    assert f"{show_gib(usable)} usable" in headroom.detail


@pytest.mark.nightly
def test_on_a_terminal_steps_stay_and_stages_are_said_before_the_first(tmp_path: Path) -> None:
    """All processes share a terminal. What is left there at the end are lines, and no bar."""
    file = write(tmp_path, FOREIGN, source="equal", accumulate=1, train="trackers = []")
    words = ("train", str(file), "--name", "it", "--nproc", "2")
    code, written = on_terminal(*words, folder=tmp_path)
    assert code == 0, written
    shown = left_of(written)
    logged = [(line["step"], f"{line['loss']:.4f}") for line in lines(tmp_path)]
    assert [step for step, _ in logged] == [1, 2, 4, 6, 8, 10]
    found = [re.match(r"step +(\d+)/10  loss (\S+)  grad norm", line) for line in shown]
    assert [(int(line[1]), line[2]) for line in found if line] == logged
    # From this process and from rank 0; they make room for what follows.
    stages = ["Importing torch", "Starting 2 processes", "Building the model", "Reading data"]
    places = [written.index(stage) for stage in stages]
    assert places == sorted(places)
    assert places[-1] < written.index("loss ")
    assert not [line for line in shown if line.startswith(tuple(stages)) or "elapsed" in line]
    # While it ran, a bar counted its steps.
    assert "elapsed" in written


# Same seed, same batch: one process or several, replicated or sharded, accumulated or not.
SAME: dict[str, tuple[int, dict[str, Any]]] = {
    "single": (1, {"kind": "single", "micro_batch": 8}),
    "ddp": (2, {"kind": "ddp"}),
    "offloaded": (2, {"kind": "zero3", "micro_batch": 2, "strategy": "offload = true"}),
    "tensor": (4, {"kind": "zero3", "strategy": "tensor = 2"}),
    "accumulated": (1, {"kind": "single", "micro_batch": 2}),
    "zero1": (2, {"kind": "zero1", "micro_batch": 2}),
    "zero3": (2, {"kind": "zero3", "strategy": 'recompute = "full"'}),
    "ddp and tensor": (4, {"kind": "ddp", "micro_batch": 2, "strategy": "tensor = 2"}),
}


@pytest.mark.parametrize("names", first_in_gate(1, [[*SAME][:4], [*SAME]]), ids=len)
def test_every_strategy_learns_the_same(names: list[str], tmp_path: Path, workers: Workers) -> None:
    found = {}
    for name in names:
        processes, fields = SAME[name]
        (tmp_path / name).mkdir()
        settings = {"train": "measure = false\ntrackers = []", **fields}
        file = write(tmp_path / name, steps=6, log_every=1, **settings)
        [ranks] = workers.run(run_toml, processes, [{"file": str(file)}])
        assert [rank["reason"] for rank in ranks] == ["done"] * processes
        found[name] = losses(tmp_path / name)
    for name, seen in found.items():
        assert seen == pytest.approx(found["single"], rel=1e-5), name
    assert found["single"][-1] < found["single"][0]


def test_a_run_is_saved_by_time_while_it_trains(tmp_path: Path, workers: Workers) -> None:
    often = "measure = false\ntrackers = []\n[train.checkpoint]\nminutes = 1e-4\nkeep = 0"
    file = write(tmp_path, steps=6, log_every=6, train=often)
    [ranks] = workers.run(run_toml, 2, [{"file": str(file)}])
    assert [rank["reason"] for rank in ranks] == ["done"] * 2
    saved = sorted((tmp_path / "runs" / "it" / "checkpoints").glob("step-*"))
    assert len(saved) > 1
    assert saved[-1].name == "step-00000006"


@pytest.mark.parametrize(
    ("settings", "early"), [("keep = 0", True), ("keep = 0\nevery = 50", False)]
)
def test_a_run_is_saved_early_unless_its_steps_are_set(
    settings: str, early: bool, tmp_path: Path, workers: Workers
) -> None:
    """With the usual minutes between saves."""
    often = f"measure = false\ntrackers = []\n[train.checkpoint]\n{settings}"
    file = write(tmp_path, steps=4, train=often)
    [ranks] = workers.run(run_saving_at_once, 2, [{"file": str(file)}])
    assert [rank["reason"] for rank in ranks] == ["done"] * 2
    saved = sorted((tmp_path / "runs" / "it" / "checkpoints").glob("step-*"))
    assert saved[-1].name == "step-00000004"
    assert (len(saved) > 1) == early


@pytest.mark.nightly
def test_a_run_that_is_killed_at_its_first_save_resumes_there(tmp_path: Path) -> None:
    """With the usual settings: the first save comes long before the usual interval."""
    running, saves = started(tmp_path), tmp_path / "runs" / "it" / "checkpoints"
    deadline = time.monotonic() + PATIENCE_S
    while not (manifests := list(saves.glob("step-????????/manifest.json"))):
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    running.kill()
    running.communicate(timeout=PATIENCE_S)
    step = int(manifests[0].parent.name.removeprefix("step-"))
    assert step > 1
    before = set(logged(tmp_path))
    again = started(tmp_path, "", "--resume")
    again.kill()
    again.communicate(timeout=PATIENCE_S)
    # Steps of the first start that were not saved are made again.
    new = [json.loads(line)["step"] for line in logged(tmp_path) if line not in before]
    assert min(new) > step


@pytest.mark.nightly
def test_under_torchrun_it_joins(tmp_path: Path) -> None:
    file = write(tmp_path, steps=4, train="trackers = []")
    words = ("--module", "shardwise", "train", str(file), "--json", "--name", "it")
    result = json.loads(torchrun(2, *words, folder=tmp_path))
    assert (result["reason"], result["steps"]) == ("done", 4)
    assert result["predicted"]["cluster"]["devices"] == 2
    assert result["measured"]["traffic"]


@pytest.mark.nightly
def test_unequal_micro_batches_name_the_rank(tmp_path: Path) -> None:
    done = train(write(tmp_path, FOREIGN, source="unequal", accumulate=2), "--nproc", "2", code=3)
    assert "step 3: rank 1 has 1 micro-batches, others have 2" in done.stderr
    assert done.stderr.count("error:") == 1


@pytest.mark.nightly
def test_a_gradient_that_is_not_finite_stops_all_ranks(tmp_path: Path) -> None:
    file = write(tmp_path, FOREIGN, source="poisoned", accumulate=1)
    done = train(file, "--nproc", "2", code=3)
    assert "not finite in step 4" in done.stderr
    assert done.stderr.count("error:") == 1
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 4]
    assert lines(tmp_path)[-1]["skipped"] == 1


def test_or_is_skipped_by_all_and_data_that_ends_everywhere_ends_the_run(
    tmp_path: Path, workers: Workers
) -> None:
    file = write(tmp_path, FOREIGN, source="poisoned", accumulate=1, train='non_finite = "skip"')
    file.write_text(file.read_text().replace("steps = 10", "steps = 40"))
    [ranks] = workers.run(run_toml, 2, [{"file": str(file)}])
    # As many as the source has.
    assert [(rank["reason"], rank["steps"]) for rank in ranks] == [("data ended", 12)] * 2
    # Tracing a large model takes minutes: only the rank that writes the prediction does it.
    assert [rank["predicts"] for rank in ranks] == [True, False]
    found = lines(tmp_path)
    assert [line["skipped"] for line in found] == [0, 0, 1, 0, 0, 0, 0]
    # Its loss is not a number, the losses after it are: no update was made from it.
    assert ["loss" in line for line in found] == [True, True, False, True, True, True, True]
    assert found[-1]["loss"] < found[0]["loss"]


@pytest.mark.parametrize(
    ("fields", "options", "message"),
    # The first are refused before ranks are started, which takes seconds of every core.
    first_in_gate(
        3,
        [
            (
                {"job": "", "micro_batch": 3},
                ("--nproc", "2"),
                "job.global_batch: 256 tokens is not a multiple of 192",
            ),
            (
                {"strategy": "shard = 3"},
                ("--nproc", "2"),
                "strategy: groups of 3 do not divide 2 devices; use 1 or 2",
            ),
            (
                {"kind": "single"},
                ("--nproc", "2"),
                "'single' uses one device but the cluster has 2",
            ),
            ({"data": '[data]\npath = "gone.txt"'}, ("--nproc", "2"), "gone.txt does not exist"),
            (
                {"train": 'trackers = ["mlflow"]'},
                ("--nproc", "1"),
                "mlflow needs the package mlflow",
            ),
            ({"train": 'device = "cuda"'}, ("--nproc", "2"), "train.device: "),
        ],
    ),
)
def test_a_run_that_cannot_be_says_so_once(
    tmp_path: Path, fields: dict[str, Any], options: tuple[str, ...], message: str
) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("some of these can be where a GPU is")
    done = train(write(tmp_path, **fields), *options, code=2)
    assert message in done.stderr
    assert done.stderr.count("error:") == 1
    assert "Traceback" not in done.stderr


def test_gpus_that_are_not_here(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    file = write(tmp_path)
    file.write_text(file.read_text().replace("1x2xCPU", "2xH100-SXM"))
    done = train(file, code=2)
    assert "--nproc 2" in done.stderr


def logged(folder: Path) -> list[str]:
    metrics = folder / "runs" / "it" / "metrics.jsonl"
    return metrics.read_text().splitlines() if metrics.exists() else []


def started(folder: Path, settings: str = "", *options: str) -> subprocess.Popen[str]:
    """A long run that has logged a few times since it was started."""
    before = set(logged(folder))
    settings = f"measure = false\ntrackers = []\n{settings}"
    file = write(folder, FOREIGN, source="equal", accumulate=1, train=settings)
    file.write_text(file.read_text().replace("steps = 10", "steps = 100_000"))
    running = subprocess.Popen(
        [*COMMAND, "train", str(file), "--nproc", "2", "--name", "it", *options],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + PATIENCE_S
    while len(set(logged(folder)) - before) < 3:
        assert running.poll() is None, running.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return running


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)]
)
def test_a_signal_stops_all_ranks_at_one_step(tmp_path: Path, number: int) -> None:
    running = started(tmp_path)
    running.send_signal(number)
    out, err = running.communicate(timeout=PATIENCE_S)
    assert "Traceback" not in err
    [line] = [line for line in out.splitlines() if line.startswith("Stopped")]
    found = re.fullmatch(
        r"Stopped by (\w+) after step ([\d,]+); saved to (\S+); resume with: (.*)", line
    )
    assert found is not None, line
    step = int(found[2].replace(",", ""))
    assert found[1] == signal.Signals(number).name
    assert (tmp_path / found[3]).resolve().name == f"step-{step:08d}"
    assert (tmp_path / found[3] / "manifest.json").is_file()
    words = shlex.split(found[4])
    assert words == [
        "shardwise", "train", str(tmp_path / "run.toml"), "--nproc", "2", "--name", "it", "--resume"
    ]  # fmt: skip
    assert running.returncode == 128 + number


def workers_of(running: subprocess.Popen[str]) -> dict[str, int]:
    """The process of each rank by its name, which `ps` shows too."""
    children = psutil.Process(running.pid).children(recursive=True)
    return {one.name(): one.pid for one in children if one.name().startswith("rank ")}


@pytest.mark.nightly
def test_nobody_outlives_a_launcher_that_is_killed(tmp_path: Path) -> None:
    running = started(tmp_path)
    workers = workers_of(running)
    assert sorted(workers) == ["rank 0", "rank 1"]
    everyone = psutil.Process(running.pid).children(recursive=True)
    running.kill()
    running.communicate(timeout=PATIENCE_S)
    deadline = time.monotonic() + PATIENCE_S
    while any(one.is_running() for one in everyone):
        assert time.monotonic() < deadline, "a process was left behind"
        time.sleep(0.2)


@pytest.mark.nightly
def test_ranks_survive_the_process_that_they_were_forked_from(tmp_path: Path) -> None:
    """They save and end with it; the launcher starts another one."""
    running = started(tmp_path)
    before = workers_of(running)
    [server] = {psutil.Process(pid).ppid() for pid in before.values()}
    assert server != running.pid
    os.kill(server, signal.SIGKILL)
    metrics = tmp_path / "runs/it/metrics.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while set(before.values()) & set(workers_of(running).values()) or len(workers_of(running)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    reached = len(metrics.read_text().splitlines())
    while len(metrics.read_text().splitlines()) < reached + 3:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    running.send_signal(signal.SIGTERM)
    _, err = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 128 + signal.SIGTERM, err
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == sorted(set(steps))


@pytest.mark.nightly
def test_a_rank_that_dies_is_named(tmp_path: Path) -> None:
    """Where the run is not to start again."""
    running = started(tmp_path, "restart = { attempts = 0 }")
    os.kill(workers_of(running)["rank 1"], signal.SIGKILL)
    _, err = running.communicate(timeout=PATIENCE_S)
    assert "rank 1 was killed by signal 9" in err
    assert running.returncode == 1
