"""A rank that hangs under torchrun, whose launcher does not watch: a process on the host does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import plant
from tests.command import PATIENCE_S, environment

pytest.importorskip("torch")


@pytest.mark.nightly
def test_a_rank_that_hangs_under_torchrun_is_killed_and_the_run_resumes(tmp_path: Path) -> None:
    limits = "restart = { named_after_s = 1, killed_after_s = 3 }"
    (tmp_path / "run.toml").write_text(
        plant.RUN.format(train=f"checkpoint = {{ every = 10 }}\n{limits}")
    )
    mark = tmp_path / "mark"
    words = ("-m", "shardwise", "train", "run.toml", "--name", "it", "--resume")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "--max-restarts", "1", *words),
        ],
        cwd=tmp_path,
        env=environment(**{plant.FAULT: "sleep@mid-step:1", plant.MARK: str(mark)}),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert mark.exists()
    assert done.returncode == 0, done.stderr
    assert "rank 1 has made no progress" in done.stderr
    lines = (tmp_path / "runs/it/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, 31))
