"""Runs that break, hang, are stopped and go on: real processes, real signals, real files."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.faults import plant
from shardwise.checkpoint.format.manifest import NAME as MANIFEST
from shardwise.checkpoint.format.manifest import read_manifest, write_manifest
from tests.command import COMMAND, PATIENCE_S, environment, shardwise
from tests.distributed.launch import free_port
from tests.distributed.workers import Workers
from tests.gate import first_in_gate

pytest.importorskip("torch")
from tests.distributed.train_run import run_toml

# Data that is a function of its position: the same samples on any number of processes.
SAME = """
cluster = "1x{processes}xCPU"
model = "benchmarks.faults.plant:plain"
job = {{ seq_len = 16, global_batch = 128 }}
strategy = {{ kind = "{kind}", micro_batch = 2, param_dtype = "fp32" }}

[train]
steps = {steps}
schedule = "constant"
learning_rate = 1e-2
log_every = 1
trackers = []
measure = false
"""


def training(*words: str) -> tuple[str, ...]:
    return ("train", "run.toml", "--name", "it", *words)


def planted(folder: Path, fault: str) -> dict[str, Any]:
    return {plant.FAULT: fault, plant.MARK: str(folder / "mark")}


def wait_for(condition: object, seconds: float = PATIENCE_S) -> None:
    assert callable(condition)
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.05)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[object]:
    """Start a run that goes on beside the test, its stderr in a file."""
    running: list[subprocess.Popen[bytes]] = []

    def start(text: str, *words: str, **variables: str) -> subprocess.Popen[bytes]:
        (tmp_path / "run.toml").write_text(text)
        with (tmp_path / "err.txt").open("w") as err, (tmp_path / "out.txt").open("w") as out:
            process = subprocess.Popen(
                [*COMMAND, *training("--nproc", "2", *words)],
                cwd=tmp_path,
                env=environment(**variables),
                stdout=out,
                stderr=err,
            )
        running.append(process)
        return process

    yield start
    from shardwise.launch.launcher import kill_tree

    for process in running:
        kill_tree(process.pid)
        process.wait()


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "runs/it/metrics.jsonl").read_text().splitlines()
    return [(one["step"], one["loss"]) for one in map(json.loads, lines)]


@pytest.mark.nightly
def test_a_rank_that_sleeps_is_named_with_its_section(tmp_path: Path, started: object) -> None:
    """At default settings; the other rank is not blamed."""
    assert callable(started)
    started(plant.RUN.format(train=""), **planted(tmp_path, "sleep@mid-step:1"))
    wait_for((tmp_path / "mark").exists)
    err = tmp_path / "err.txt"
    wait_for(lambda: "no progress" in err.read_text())
    [line] = [one for one in err.read_text().splitlines() if "no progress" in one]
    assert "rank 1 has" in line
    assert "section step" in line
    assert "waiting for it: rank 0" in line
    stacks = tmp_path / "runs/it/hangs/attempt-1"
    wait_for((stacks / "summary.txt").exists)
    assert "plant.py" in (stacks / "rank-1.txt").read_text()
    assert "distributed" in (stacks / "rank-0.txt").read_text()


@pytest.mark.timing
def test_slow_saves_and_slow_first_steps_are_no_hangs(tmp_path: Path) -> None:
    """Each takes longer than what names a hang in a step."""
    text = plant.RUN.format(
        train="checkpoint = { every = 10, background = false }\n"
        "restart = { named_after_s = 1, killed_after_s = 2 }"
    )
    (tmp_path / "run.toml").write_text(text)
    done = shardwise(
        *training("--nproc", "2"), folder=tmp_path, SHARDWISE_PLANTED_FIRST_STEP_S="3",
        **planted(tmp_path, "pause@during shard write:1"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "mark").exists()
    assert "no progress" not in done.stderr
    assert not (tmp_path / "runs/it/recoveries.jsonl").exists()


@pytest.mark.timing
def test_steps_longer_than_the_limits_are_no_hangs(tmp_path: Path) -> None:
    """Limits of 1/4 and 3/4 of a step, with saves on, on one process and on two side by side.

    In the gate, steps longer than the limits come before the hang of the next test.
    """
    step_s, steps = 4.0, 14
    running = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        limits = f"named_after_s = {step_s / 4}, killed_after_s = {step_s * 3 / 4}"
        text = plant.RUN.format(
            train=f"checkpoint = {{ every = 6 }}\nrestart = {{ {limits} }}"
        ).replace("steps = 30", f"steps = {steps}")
        (folder / "run.toml").write_text(text.replace("1x2xCPU", f"1x{processes}xCPU"))
        running.append((folder, subprocess.Popen(
            [*COMMAND, *training("--nproc", str(processes))], cwd=folder,
            env=environment(**{plant.STEP_S: str(step_s)}),
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )))  # fmt: skip
    for folder, process in running:
        _, err = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, err
        assert not (folder / "runs/it/recoveries.jsonl").exists(), err
        assert not (folder / "runs/it/hangs").exists(), err
        assert [step for step, _ in losses(folder)] == list(range(1, steps + 1))


@pytest.mark.nightly
def test_a_rank_that_hangs_after_long_steps_is_named_and_killed(tmp_path: Path) -> None:
    """Fifteen steps of 0.4 s are longer than the limits set, and no hangs.

    They were learned: the limits that follow from them are 2 s and 4 s.
    """
    text = plant.RUN.format(
        train="checkpoint = { every = 10 }\n"
        "restart = { named_after_s = 0.1, killed_after_s = 0.3 }"
    )  # fmt: skip
    (tmp_path / "run.toml").write_text(text)
    done = shardwise(
        *training("--nproc", "2"), folder=tmp_path,
        **{**planted(tmp_path, "sleep@mid-step:1"), plant.STEP_S: "0.4"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    [recovery] = map(json.loads, (tmp_path / "runs/it/recoveries.jsonl").read_text().splitlines())
    assert "rank 1" in recovery["cause"]
    assert "section step" in recovery["cause"]
    assert recovery["failed_step"] == plant.STEP + 1
    assert recovery["replayed_steps"] == plant.STEP - 10
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 31))


@pytest.mark.nightly
def test_a_run_that_makes_no_progress_is_given_up(tmp_path: Path) -> None:
    text = plant.RUN.format(train="checkpoint = { every = 10 }\nrestart = { attempts = 2 }")
    (tmp_path / "run.toml").write_text(text)
    fault = planted(tmp_path, "every exception@mid-step:1")
    done = shardwise(*training("--nproc", "2"), folder=tmp_path, **fault)
    assert done.returncode == 1
    assert done.stderr.count("Restarting") == 2
    assert "a planted exception" in done.stderr  # as rank 1 said it
    steps = sorted(path.name for path in (tmp_path / "runs/it/checkpoints").glob("step-*"))
    assert steps == ["step-00000010"]


def listening(pid: int) -> list[str]:
    """Addresses that a process listens on."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        target = os.readlink(link)
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    found = []
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                words = bytes.fromhex(fields[1].partition(":")[0])
                address = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                found.append(socket.inet_ntop(family, address))
    return found


@pytest.mark.nightly
def test_nobody_outside_reaches_a_run_of_one_machine(tmp_path: Path, started: object) -> None:
    assert callable(started)
    process = started(plant.RUN.format(train="").replace("steps = 30", "steps = 100000"))
    wait_for((tmp_path / "runs/it/metrics.jsonl").exists)
    workers = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    )
    pids = [process.pid, *(int(pid) for pid in workers.stdout.split())]
    assert len(pids) == 3
    addresses = {pid: listening(pid) for pid in pids}
    assert addresses[process.pid]  # the store
    assert {one for found in addresses.values() for one in found} <= {
        "127.0.0.1", "::1", "::ffff:127.0.0.1"
    }  # fmt: skip


@pytest.mark.nightly
def test_a_run_that_was_asked_to_stop_goes_on_as_if_it_had_not(
    tmp_path: Path, started: object, workers: Workers
) -> None:
    """SIGUSR1, as schedulers send it before the time is up; the code says by what it ended."""
    assert callable(started)
    text = plant.RUN.format(train="").replace("steps = 30", "steps = 200")
    process = started(text)
    metrics = tmp_path / "runs/it/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 20)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(240) == 128 + signal.SIGUSR1
    [saved] = (tmp_path / "runs/it/checkpoints").glob("step-*")
    made = losses(tmp_path)
    assert int(saved.name.removeprefix("step-")) == len(made) < 200
    resumed = shardwise(*training("--nproc", "2", "--resume"), folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert f"Resuming from step {len(made)} " in resumed.stdout
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    (undisturbed / "run.toml").write_text(text)
    workers.run(run_toml, 2, [{"file": str(undisturbed / "run.toml")}])
    assert losses(tmp_path) == losses(undisturbed)
    last = "runs/it/checkpoints/step-00000200/rank-00001.safetensors"
    assert (tmp_path / last).read_bytes() == (undisturbed / last).read_bytes()


@pytest.mark.parametrize("number", first_in_gate(1, [signal.SIGUSR1, signal.SIGTERM]))
def test_a_signal_to_every_process_of_a_job_stops_it_after_a_checkpoint(
    tmp_path: Path, started: object, number: signal.Signals
) -> None:
    """As Slurm sends it: also to the processes between the launcher and its ranks."""
    assert callable(started)
    process = started(plant.RUN.format(train="").replace("steps = 30", "steps = 2000"))
    metrics = tmp_path / "runs/it/metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") > 5)
    launcher = psutil.Process(process.pid)
    for one in (launcher, *launcher.children(recursive=True)):
        one.send_signal(number)
    assert process.wait(240) == 128 + number
    [saved] = (tmp_path / "runs/it/checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-")) == len(losses(tmp_path)) < 2000


def test_other_processes_go_on_with_the_same_samples(tmp_path: Path, workers: Workers) -> None:
    """Ten steps on 2, ten on 1, ten on 4: the losses of thirty on 2, but for rounding."""
    folders = [tmp_path / "changing", tmp_path / "same"]
    for folder in folders:
        folder.mkdir()
    for processes, kind, steps in ((2, "zero3", 10), (1, "single", 20), (4, "zero2", 30)):
        text = SAME.format(processes=processes, kind=kind, steps=steps)
        (folders[0] / "run.toml").write_text(text)
        [ranks] = workers.run(run_toml, processes, [{"file": str(folders[0] / "run.toml")}])
        assert [rank["steps"] for rank in ranks] == [steps] * processes
    (folders[1] / "run.toml").write_text(SAME.format(processes=2, kind="zero3", steps=30))
    workers.run(run_toml, 2, [{"file": str(folders[1] / "run.toml")}])
    mixed, plain = (losses(folder) for folder in folders)
    assert [step for step, _ in mixed] == list(range(1, 31))
    assert [loss for _, loss in mixed] == pytest.approx([loss for _, loss in plain], rel=1e-4)


def test_another_order_of_samples_is_refused(tmp_path: Path, workers: Workers) -> None:
    text = SAME.format(processes=1, kind="single", steps=3)
    (tmp_path / "run.toml").write_text(text)
    workers.run(run_toml, 1, [{"file": str(tmp_path / "run.toml")}])
    (tmp_path / "run.toml").write_text(text.replace("[train]", "[train]\nseed = 7"))
    assert refusal(tmp_path).startswith("error: train.seed: ")
    # Saved by a version that drew other synthetic sequences.
    (tmp_path / "run.toml").write_text(text)
    [file] = tmp_path.glob(f"runs/it/checkpoints/*/{MANIFEST}")
    saved = read_manifest(file.read_bytes())
    versions = {
        name: version for name, version in saved.versions.items() if name != "synthetic data"
    }
    assert versions != saved.versions
    file.write_bytes(write_manifest(saved.model_copy(update={"versions": versions})))
    assert refusal(tmp_path).startswith("error: data: ")


def refusal(folder: Path) -> str:
    """The one sentence with which a run does not resume."""
    done = shardwise(*training("--nproc", "1", "--resume"), folder=folder)
    assert done.returncode == 2
    [error] = [line for line in done.stderr.splitlines() if not line.endswith("…")]
    return error


@pytest.mark.nightly
def test_two_launchers_start_again_together(tmp_path: Path) -> None:
    """As on two machines: a rank of the second is killed, and both come back in a new round."""
    text = plant.RUN.format(train="checkpoint = { every = 10 }").replace("1x2xCPU", "2x1xCPU")
    (tmp_path / "run.toml").write_text(text)
    shared = {
        "PET_NNODES": "2",
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{free_port()}",
        "PET_RDZV_ID": "two",
        **planted(tmp_path, "SIGKILL@mid-step:1"),
    }
    launchers = [
        subprocess.Popen(
            [*COMMAND, *training("--nproc", "1")], cwd=tmp_path, env=environment(**shared),
            text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for _ in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=PATIENCE_S) for process in launchers]
    assert [process.returncode for process in launchers] == [0, 0], said
    assert (tmp_path / "mark").exists()
    assert "rank 1 was killed by signal 9" in said[0][1] + said[1][1]
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 31))
