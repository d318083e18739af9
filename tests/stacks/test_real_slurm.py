"""The script for Slurm as a job of a real Slurm: a node is lost, time runs out, and it resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest

from shardwise.spec.run import write_run
from shardwise.stacks.write.exported import Target
from shardwise.stacks.write.slurm import export
from tests.stacks.runs import tiny
from tests.stacks.slurm_cluster import Slurm, missing, slurm, wait_until

REASON = missing()
pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]
STEPS = 1200


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """Complete lines of a file in the only run folder; none before it exists."""
    found = list(folder.glob(f"runs/*/{name}"))
    assert len(found) < 2
    texts = [text for file in found for text in file.read_text().splitlines(keepends=True)]
    return [json.loads(text) for text in texts if text.endswith("\n")]


def trains(cluster: Slurm, node: str) -> bool:
    """Whether a rank runs on a node; a spare has a launcher that is ready to start some."""
    names = [psutil.Process(pid).name() for pid in cluster.processes(node)]
    return any(name.startswith("rank ") for name in names)


def write_job(folder: Path, steps: int) -> Path:
    """The script of a run on two nodes with a spare, beside its run.toml."""
    pytest.importorskip("transformers")
    run = tiny(cluster="2x1xCPU", train={"steps": steps, "checkpoint": {"every": 20}})
    folder.mkdir()
    (folder / "run.toml").write_text(write_run(run))
    script = folder / "run.sbatch"
    script.write_text(export(run, Target(spares=1)).text)
    return script


def wait_for_step(step: int, folder: Path) -> None:
    wait_until(lambda: len(lines(folder, "metrics.jsonl")) >= step)


def test_a_job_loses_a_node_is_requeued_and_finishes(tmp_path: Path) -> None:
    folder = tmp_path / "job"
    script = write_job(folder, STEPS)
    with slurm(tmp_path / "slurm", 3) as cluster:
        job = cluster.submit(script)
        wait_for_step(60, folder)
        # The script itself runs on the first node.
        lost = next(node for node in ("n2", "n3") if trains(cluster, node))
        cluster.lose(lost)
        wait_until(lambda: lines(folder, "recoveries.jsonl"))
        [recovery] = lines(folder, "recoveries.jsonl")
        assert recovery["blamed_host"].startswith(f"{lost} (")
        # Slurm has noticed too, and the job goes on.
        wait_until(lambda: cluster.output("squeue", "-ho", "%D %T").split() == ["2", "RUNNING"])

        # What Slurm sends before the time limit, to the same processes.
        assert len(lines(folder, "metrics.jsonl")) < STEPS - 100
        cluster.output("scancel", "--signal=USR1", job)
        wait_until(lambda: cluster.state(job) == "PENDING")
        assert "Stopped by SIGUSR1" in (folder / f"small-zero3-{job}.log").read_text()
        assert len(lines(folder, "metrics.jsonl")) < STEPS

        # Slurm starts a job again after two minutes, on as many nodes as before.
        cluster.start(lost)
        wait_until(lambda: cluster.state(job) == "COMPLETED")
    assert [one["step"] for one in lines(folder, "metrics.jsonl")] == list(range(1, STEPS + 1))


def test_a_job_that_loses_its_first_node_is_requeued(tmp_path: Path) -> None:
    script = write_job(tmp_path / "job", 100_000)
    with slurm(tmp_path / "slurm", 3) as cluster:
        job = cluster.submit(script)
        wait_for_step(5, script.parent)
        cluster.lose("n1")
        wait_until(lambda: cluster.state(job) == "PENDING")
        assert all(len(cluster.processes(node)) == 1 for node in ("n2", "n3")), "not only slurmd"
