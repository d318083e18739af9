"""States and offload on real processes: the same losses, and resumed to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.runs import losses, write
from tests.distributed.test_optimizers import _checksums
from tests.distributed.workers import Workers
from tests.gate import in_gate

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("torchao")
from tests.distributed.train_run import run_toml

CHECKPOINT = 'schedule = "constant"\n[train.checkpoint]\nevery = 2'


def trained(workers: Workers, folder: Path, *steps: int, **fields: Any) -> list[float]:
    """The losses of a run on `processes` (2), started again after each of `steps`."""
    processes = fields.pop("processes", 2)
    folder.mkdir()
    for number in steps:
        file = write(folder, steps=number, train=CHECKPOINT, log_every=1, **fields)
        [told] = workers.run(run_toml, processes, [{"file": str(file)}])
        assert (told[0].get("reason"), told[0].get("steps")) == ("done", number), told
    return losses(folder)


RESUMED: list[dict[str, Any]] = [
    {"kind": "zero3", "dtype": "bf16", "strategy": 'states = "bf16+stochastic"'},
    {"kind": "zero3", "dtype": "bf16", "strategy": 'offload = "optimizer"'},
    {"kind": "ddp", "dtype": "bf16", "strategy": 'states = "bf16+stochastic"'},
    {"kind": "zero2", "dtype": "bf16", "strategy": 'offload = ["optimizer", "activations"]'},
    {"kind": "ddp", "dtype": "bf16", "strategy": 'states = "bf16"\noffload = "activations"'},
    # With more than 2 ranks, sums depend on where in DDP's buckets a gradient is.
    {"kind": "ddp", "processes": 4, "micro_batch": 2, "strategy": "ddp_bucket_mib = 0.02"},
]


@pytest.mark.parametrize("fields", in_gate(RESUMED[:2], RESUMED))
def test_a_resumed_run_is_equal_to_the_bit(
    workers: Workers, tmp_path: Path, fields: dict[str, Any]
) -> None:
    at_once = trained(workers, tmp_path / "once", 4, **fields)
    assert trained(workers, tmp_path / "twice", 2, 4, **fields) == at_once
    assert _checksums(tmp_path / "twice") == _checksums(tmp_path / "once")


EQUAL: list[dict[str, str]] = [
    {"kind": "zero3", "strategy": 'recompute = 0.5\noffload = "activations"'},
    {"kind": "ddp", "strategy": 'offload = ["optimizer", "activations"]'},
    {"kind": "zero2", "strategy": 'recompute = "full"\noffload = "parameters+activations"'},
]


@pytest.mark.parametrize("fields", in_gate(EQUAL[:2], EQUAL))
def test_offload_changes_no_bit_where_dtypes_are_equal(
    workers: Workers, tmp_path: Path, fields: dict[str, str]
) -> None:
    there = trained(workers, tmp_path / "there", 4, **fields)
    kept = {**fields, "strategy": fields["strategy"].partition("offload")[0]}
    assert there == trained(workers, tmp_path / "here", 4, **kept)
