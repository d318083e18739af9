"""Checkpoints load across any mesh to the bit, and every one of them is intact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.verify.fsck import find_checkpoints, verify_checkpoint
from tests.distributed.workers import Workers

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.mesh_checkpoint_run import load_and_save, save_trained

TWO_BY_TWO: dict[str, Any] = {"kind": "zero3", "tensor": 2}
# Shard x tensor, unless named otherwise: 4 x 1, 1 x 4, one process, 2 x 2 again; then others.
CHAIN: tuple[tuple[int, dict[str, Any]], ...] = (
    (4, {"kind": "zero3"}),
    (4, {"kind": "zero3", "tensor": 4}),
    (1, {"kind": "single"}),
    (4, TWO_BY_TWO),
    # Norms are then not on the mesh of divided layers.
    (4, {"kind": "zero2", "tensor": 2, "sequence_parallel": False}),
    # Parameters are plain tensors that are parts.
    (4, {"kind": "ddp", "tensor": 2}),
    (4, {"kind": "zero3", "context": 2, "tensor": 2}),
    (2, {"kind": "ddp", "tensor": 2, "sequence_parallel": False}),
    (4, {"kind": "zero3", "tensor": 2, "tensor_across_nodes": True}),
    (3, {"kind": "zero3"}),
)


def test_every_mesh_loads_what_another_saved(tmp_path: Path, workers: Workers) -> None:
    place = tmp_path / "checkpoints"
    case: dict[str, Any] = {"strategy": TWO_BY_TWO, "place": str(place)}
    [saved] = workers.run(save_trained, 4, [case])
    assert any(name.endswith("embed_tokens.weight.exp_avg_sq") for name in saved[0])
    for step, (processes, strategy) in enumerate(CHAIN, start=2):
        more = {"strategy": strategy, "step": step, "background": step % 2 == 0}
        [ranks] = workers.run(load_and_save, processes, [{**case, **more}])
        for rank, found in enumerate(ranks):
            assert (found["step"], found["passed_over"]) == (step - 1, [])
            assert found["digests"] == saved[0], f"{strategy} on rank {rank}"
    found = find_checkpoints(str(place))
    assert len(found.folders) == len(CHAIN) + 1
    assert [verify_checkpoint(folder).findings for folder in found.folders] == [[]] * len(
        found.folders
    )
