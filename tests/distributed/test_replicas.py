"""Replica groups that fail and return while others train on: real processes, real torchft."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("torchft", reason="needs torchft: pip install shardwise[torchft]")
import psutil
import torch

from benchmarks.replicas.groups import Groups, replica_groups, wait_until
from benchmarks.replicas.recorded import COMMIT_S
from shardwise.checkpoint.format.synced import UNFINISHED
from tests.command import shardwise

PLAIN = """
cluster = "1x2xCPU"
model = "benchmarks.replicas.recorded:model"
job = { seq_len = 16 }

[strategy]
kind = "zero3"
micro_batch = 2
accumulate = 2
grad_sync = "last"
param_dtype = "fp32"

[train]
steps = 12
schedule = "constant"
learning_rate = 1e-2
trackers = []
measure = false
meta_init = false
threads = 1
"""


# How long a lighthouse is down.
DOWN_S = 5.0


def reaches(groups: Groups, step: int, group: int) -> bool:
    def reached() -> bool:
        return any(one.group == group and one.step >= step for one in groups.commits())

    return wait_until(reached)


def last_step(groups: Groups) -> int:
    return max(one.step for one in groups.commits())


def assert_same_bits(groups: Groups) -> None:
    """Of every step, all groups that committed it hold the same state, and no step is missing."""
    digests: dict[tuple[int, int], set[int]] = {}
    for one in groups.commits():
        digests.setdefault((one.step, one.rank), set()).add(one.digest)
    assert {step for step, _ in digests} == set(range(1, last_step(groups) + 1))
    assert all(len(different) == 1 for different in digests.values())


def listening(pid: int) -> set[str]:
    """The addresses on which a process and its descendants listen."""
    processes = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    connections = [one for process in processes for one in process.net_connections("tcp")]
    return {one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN}


def test_a_killed_group_returns_and_the_others_never_stop(tmp_path: Path) -> None:
    """The first group is killed, which writes the checkpoints."""
    with replica_groups(tmp_path, groups=2) as groups:
        for group in range(2):
            groups.start(group)
        assert reaches(groups, 25, group=1), groups.said(1)
        assert listening(groups.pid(0)) | listening(groups.pid(1)) == {"127.0.0.1"}
        survivor = {child.pid for child in psutil.Process(groups.pid(1)).children(recursive=True)}
        groups.kill(0)
        assert wait_until(lambda: groups.present(1) == [1]), groups.said(1)
        alone = last_step(groups)
        assert reaches(groups, alone + 5, group=1)
        groups.start(0)
        assert wait_until(lambda: groups.present(1) == [0, 1]), groups.said(0)
        assert reaches(groups, last_step(groups) + 5, group=0)
        children = psutil.Process(groups.pid(1)).children(recursive=True)
        assert {child.pid for child in children} == survivor
        assert groups.stop() == [143, 143]
        assert_same_bits(groups)
        assert "Replica group 0 is absent" in groups.said(1)
        assert "absent batches are dropped" in groups.said(1)
        assert "received the state of step" in groups.said(0)
    saved = sorted((tmp_path / "runs/it/checkpoints").glob("step-*"))
    assert saved[-1].name == f"step-{last_step(groups):08d}"


@pytest.mark.nightly
def test_a_group_that_comes_after_the_end_has_nothing_to_do(tmp_path: Path) -> None:
    """It loads the last checkpoint, and neither starts from step 0 nor waits for others."""
    with replica_groups(tmp_path, groups=2, steps=12) as groups:
        for group in range(2):
            groups.start(group)
        assert groups.ended() == [0, 0], groups.said(0)
        assert (tmp_path / "runs/it/checkpoints/step-00000012/manifest.json").exists()
        assert_same_bits(groups)
        before = len(groups.commits())
        groups.kill_lighthouse()
        groups.start(1)
        assert groups.ended() == [0, 0], groups.said(1)
        assert len(groups.commits()) == before


# A limit that the last save exceeds several times.
SHORT = "replica_timeout_s = 4"


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs/it/checkpoints").glob("step-*"))


@pytest.mark.nightly
def test_a_last_save_longer_than_the_timeout_is_made_once(tmp_path: Path) -> None:
    """In place and not from a copy, by a group that answers the others meanwhile."""
    with replica_groups(tmp_path, groups=2, steps=12, restart=SHORT) as groups:
        run = tmp_path / "run.toml"
        run.write_text(run.read_text().replace("every = 20", "background = false"))
        for group in range(2):
            groups.start(group, variables={COMMIT_S: "15"})
        assert groups.ended() == [0, 0], groups.said(0) + groups.said(1)
        assert checkpoints(tmp_path) == ["step-00000012"]
        assert "Restarting" not in groups.said(0) + groups.said(1)
        assert_same_bits(groups)


@pytest.mark.nightly
def test_if_the_group_that_saves_last_is_lost_another_one_saves(tmp_path: Path) -> None:
    with replica_groups(tmp_path, groups=2, steps=12, restart=SHORT) as groups:
        groups.start(0, variables={COMMIT_S: "3600"})
        groups.start(1)
        unfinished = f"step-00000012{UNFINISHED}"
        assert wait_until(lambda: checkpoints(tmp_path) == [unfinished]), groups.said(0)
        groups.kill(0)
        assert groups.ended(only=1) == [0], groups.said(1)
        assert checkpoints(tmp_path) == ["step-00000012"]


@pytest.mark.nightly
def test_a_last_checkpoint_that_is_corrupt_is_saved_again(tmp_path: Path) -> None:
    with replica_groups(tmp_path, groups=2, steps=12, restart="last_call_s = 0.5") as groups:
        run = tmp_path / "run.toml"
        run.write_text(run.read_text().replace("every = 20", "every = 5"))
        groups.start(0)
        assert groups.ended() == [0], groups.said(0)
        last = tmp_path / "runs/it/checkpoints/step-00000012"
        (last / "rank-00001.safetensors").write_bytes(b"")
        groups.start(0)
        assert groups.ended() == [0], groups.said(0)
        assert checkpoints(tmp_path) == ["step-00000010", last.name, f"{last.name}.broken-1"]
        assert (last / "rank-00001.safetensors").stat().st_size > 0


@pytest.mark.nightly
def test_a_lighthouse_that_restarts_is_survived(tmp_path: Path) -> None:
    with replica_groups(tmp_path, groups=2) as groups:
        for group in range(2):
            groups.start(group)
        assert reaches(groups, 10, group=0), groups.said(0)
        groups.kill_lighthouse()
        time.sleep(DOWN_S)
        waits_at = last_step(groups)
        groups.start_lighthouse()
        assert reaches(groups, waits_at + 10, group=0), groups.said(0)
        assert reaches(groups, waits_at + 10, group=1), groups.said(1)
        assert groups.stop() == [143, 143]
        assert_same_bits(groups)
        assert "Restarting" not in groups.said(0) + groups.said(1)


@pytest.mark.nightly
def test_a_frozen_group_is_left_out_and_catches_up(tmp_path: Path) -> None:
    """As after a lost link: its processes still run, and never restart."""
    with replica_groups(tmp_path, groups=2, restart="replica_timeout_s = 8") as groups:
        for group in range(2):
            groups.start(group)
        assert reaches(groups, 10, group=1), groups.said(1)
        frozen = [psutil.Process(groups.pid(1))]
        frozen += frozen[0].children(recursive=True)
        for process in frozen:
            process.suspend()
        assert wait_until(lambda: groups.present(0) == [0]), groups.said(0)
        assert reaches(groups, last_step(groups) + 5, group=0)
        for process in frozen:
            process.resume()
        assert wait_until(lambda: groups.present(0) == [0, 1]), groups.said(1)
        assert reaches(groups, last_step(groups) + 5, group=1)
        assert groups.stop() == [143, 143]
        assert_same_bits(groups)
        assert "Restarting" not in groups.said(0) + groups.said(1)


@pytest.mark.nightly
def test_a_group_that_is_stopped_leaves_and_the_last_one_saves(tmp_path: Path) -> None:
    with replica_groups(tmp_path, groups=2) as groups:
        for group in range(2):
            groups.start(group)
        assert reaches(groups, 10, group=0), groups.said(0)
        assert groups.stop(signal.SIGTERM, only=0) == [143]
        left_at = last_step(groups)
        assert reaches(groups, left_at + 5, group=1), groups.said(1)
        assert groups.stop(signal.SIGTERM, only=1) == [143]
        assert_same_bits(groups)
    last = f"step-{last_step(groups):08d}"
    assert (tmp_path / "runs/it/checkpoints" / last / "manifest.json").exists()


@pytest.mark.nightly
def test_a_group_of_another_run_is_refused_and_the_others_train_on(tmp_path: Path) -> None:
    with replica_groups(tmp_path, groups=2) as groups:
        groups.start(0)
        assert reaches(groups, 5, group=0), groups.said(0)
        run = tmp_path / "run.toml"
        run.write_text(run.read_text().replace("weight_decay = 0.1", "weight_decay = 0.2"))
        groups.start(1)
        assert groups.ended(only=1) == [2]
        assert "trains another run" in groups.said(1)
        assert reaches(groups, last_step(groups) + 5, group=0), groups.said(0)
        assert "Restarting" not in groups.said(0)


@pytest.mark.nightly
def test_given_batches_are_trained_by_those_present(tmp_path: Path) -> None:
    """One group of two trains alone what a plain run of the same batch trains."""
    restart = 'absent_batches = "given"\nlast_call_s = 0.5'
    with replica_groups(
        tmp_path / "given", groups=2, steps=12, restart=restart, strategy='grad_sync = "last"'
    ) as groups:
        groups.start(0)
        assert groups.ended() == [0], groups.said(0)
        assert "given to the others" in groups.said(0)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "run.toml").write_text(PLAIN)
    done = shardwise("train", "run.toml", "--nproc", "2", "--name", "it", folder=plain)
    assert done.returncode == 0, done.stderr
    given, expected = (weights(folder / "runs/it") for folder in (groups.folder, plain))
    assert given.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(given[name], tensor, rtol=1e-4, atol=1e-5)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """The parameters of the last checkpoint, each in the parts that ranks wrote."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted((folder / "checkpoints/step-00000012").glob("*.safetensors")):
        for name, tensor in load_file(path).items():
            if name.startswith("model."):
                found[f"{path.stem}/{name}"] = tensor
    return found
