"""Checkpoints of divided experts load across every degree of expert parallelism, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwise.checkpoint.verify.fsck import find_checkpoints, verify_checkpoint
from tests.distributed.workers import Workers

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.expert_checkpoint_run import load_and_save, save_trained

CHAIN: tuple[tuple[int, dict[str, Any]], ...] = (
    (4, {"kind": "zero3", "expert": 4}),
    (1, {"kind": "single"}),
    (4, {"kind": "zero2", "shard": 2, "expert": 2}),
    (4, {"kind": "zero3"}),
    (2, {"kind": "zero1", "expert": 2}),
    (3, {"kind": "zero3"}),
)


def test_every_degree_loads_what_another_saved(tmp_path: Path, workers: Workers) -> None:
    place = tmp_path / "checkpoints"
    case = {"strategy": {"kind": "zero3", "expert": 2}, "place": str(place)}
    [saved] = workers.run(save_trained, 4, [case])
    assert any(name.endswith("experts.gate_up_proj_bias.exp_avg_sq") for name in saved[0])
    for step, (processes, strategy) in enumerate(CHAIN, start=2):
        more = {"strategy": strategy, "step": step, "background": step % 2 == 0}
        [ranks] = workers.run(load_and_save, processes, [{**case, **more}])
        for rank, found in enumerate(ranks):
            assert (found["step"], found["passed_over"]) == (step - 1, [])
            assert found["digests"] == saved[0], f"{strategy} on rank {rank}"
    found = find_checkpoints(str(place))
    assert len(found.folders) == len(CHAIN) + 1
    assert all(verify_checkpoint(folder).findings == [] for folder in found.folders)
