"""What is exported for Lightning trains there, sharded as planned, to the trainer's own losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.run import RunSpec, write_run
from shardwise.stacks.write.lightning import export
from tests.command import ROOT, shardwise
from tests.distributed.launch import results, torchrun
from tests.distributed.runs import losses
from tests.stacks.runs import tiny

pytest.importorskip("lightning")
pytest.importorskip("transformers")

pytestmark = pytest.mark.nightly

STEPS = 4


def trained(run: RunSpec, folder: Path) -> dict[str, Any]:
    """By Lightning, on two processes."""
    (folder / "lightning_run.py").write_text(export(run).text)
    script = str(ROOT / "tests/distributed/lightning_run.py")
    [found] = results(torchrun(2, script, folder=folder))
    return found


def by_the_trainer(run: RunSpec, folder: Path) -> list[float]:
    (folder / "run.toml").write_text(write_run(run))
    done = shardwise("train", "run.toml", "--nproc", "2", "--name", "it", folder=folder)
    assert done.returncode == 0, done.stderr
    return losses(folder)


def run_of(kind: str, **strategy: Any) -> RunSpec:
    # Without its batch, accumulation is what the strategy says.
    return tiny(
        job={"seq_len": 32, "global_batch": None},
        strategy={"kind": kind, **strategy},
        train={"steps": STEPS, "schedule": "cosine", "warmup_steps": 2},
    )


def test_zero3_is_sharded_by_lightning_and_learns_the_same(tmp_path: Path) -> None:
    run = run_of("zero3", recompute="full")
    found = trained(run, tmp_path)
    assert found["sharded"] == found["tensors"]
    assert found["placements"] == ["S(0)"]
    # Dimension 0 of every tensor of this model is even.
    assert found["local"] == found["parameters"] // 2
    # 3 blocks and the root: all gathered in the forward, the blocks again in the backward.
    assert found["counted"]["all_gather/2"] == 4 + 3
    assert found["counted"]["reduce_scatter/2"] == 4
    assert found["losses"] == pytest.approx(by_the_trainer(run, tmp_path), rel=1e-5)


def test_zero1_reduces_only_the_last_micro_batch(tmp_path: Path) -> None:
    found = trained(run_of("zero1", accumulate=2), tmp_path)
    # Gathered once for both micro-batches, reduced once.
    assert found["counted"]["all_gather/2"] == 4
    assert found["counted"]["reduce_scatter/2"] == 4


def test_ddp_is_wrapped_by_lightning_and_learns_the_same(tmp_path: Path) -> None:
    run = run_of("ddp")
    found = trained(run, tmp_path)
    assert found["wrapped"] == "DistributedDataParallel"
    assert found["sharded"] == 0
    assert "all_gather/2" not in found["counted"]
    assert found["losses"] == pytest.approx(by_the_trainer(run, tmp_path), rel=1e-5)
