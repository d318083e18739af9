"""Ranks of a run with tensor parallelism are killed; it recovers to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import plant
from tests.command import shardwise

pytest.importorskip("torch")
pytest.importorskip("transformers")

RUN = """
cluster = "1x{processes}xCPU"
job = {{ seq_len = 16 }}
strategy = {{ {strategy}, micro_batch = 2, param_dtype = "fp32" }}
data = {{ source = "tests.distributed.tensor_plant:batches" }}

[model]
family = "llama"
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn = 48
vocab = 64
max_positions = 16
tied = true

[train]
steps = 24
learning_rate = 1e-2
log_every = 1
trackers = []
measure = false
checkpoint = {{ every = 8 }}
"""
STRATEGIES = {
    "tensor": (2, 'kind = "zero3", tensor = 2'),
    "shard and tensor": (4, 'kind = "zero3", tensor = 2'),
    "ddp and tensor": (4, 'kind = "ddp", tensor = 2, sequence_parallel = false'),
    "context and tensor": (4, 'kind = "zero2", context = 2, tensor = 2, recompute = "full"'),
}
CASES = [
    ("tensor", "SIGKILL@mid-step:1"),
    ("tensor", "SIGKILL@during shard write:0"),
    ("shard and tensor", "SIGKILL@mid-step:2"),
    ("shard and tensor", "SIGKILL@during shard write:3"),
    ("shard and tensor", "exception@mid-step:1"),
    ("ddp and tensor", "SIGKILL@mid-step:3"),
    ("context and tensor", "SIGKILL@mid-step:1"),
]


def trained(folder: Path, layout: str, **variables: Any) -> dict[str, Any]:
    """Every byte of the last checkpoint, and every loss."""
    folder.mkdir()
    processes, strategy = STRATEGIES[layout]
    (folder / "run.toml").write_text(RUN.format(processes=processes, strategy=strategy))
    words = ("train", "run.toml", "--name", "it", "--nproc", str(processes))
    done = shardwise(*words, folder=folder, OMP_NUM_THREADS="1", **variables)
    assert done.returncode == 0, done.stderr
    run = folder / "runs" / "it"
    files = sorted((run / "checkpoints" / "step-00000024").glob("rank-*"))
    assert len(files) == 2 * processes  # the tensors of a rank and their index
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    losses = [(one["step"], one["loss"]) for one in lines]
    assert [step for step, _ in losses] == list(range(1, 25))
    return {"losses": losses, **{file.name: file.read_bytes() for file in files}}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What runs without a fault end with, by layout."""
    return {}


@pytest.mark.parametrize(
    ("layout", "fault"),
    [pytest.param(*case, marks=[pytest.mark.nightly] if number else [])
     for number, case in enumerate(CASES)],
)  # fmt: skip
def test_a_killed_rank_costs_no_bit(
    layout: str, fault: str, tmp_path: Path, undisturbed: dict[str, dict[str, Any]]
) -> None:
    if layout not in undisturbed:
        undisturbed[layout] = trained(tmp_path / "undisturbed", layout)
    variables = {plant.FAULT: fault, plant.MARK: str(tmp_path / "mark")}
    found = trained(tmp_path / "disturbed", layout, **variables)
    assert (tmp_path / "mark").exists()
    [recovery] = map(
        json.loads,
        (tmp_path / "disturbed/runs/it/recoveries.jsonl").read_text().splitlines(),
    )
    # Step 15 is in progress, or the second save.
    assert recovery["loaded_step"] == 8
    assert found == undisturbed[layout]
