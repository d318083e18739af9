"""Layouts of real processes: replicas, meshes without a rule, and ranks that disagree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.checkpoint.verify.fsck import find_checkpoints, verify_checkpoint
from tests.distributed.workers import Workers
from tests.gate import first_in_gate

pytest.importorskip("torch")
from tests.distributed.layout_run import LARGE, load, reduce_in_levels, save


@pytest.mark.parametrize("background", first_in_gate(1, [True, False]))
def test_any_mesh_is_saved_and_loads(tmp_path: Path, workers: Workers, background: bool) -> None:
    place = str(tmp_path / "checkpoints")
    assert workers.run(save, 4, [{"place": place, "background": background}]) == [[""] * 4]
    [folder] = find_checkpoints(place).folders
    assert verify_checkpoint(folder).findings == []
    step = tmp_path / "checkpoints" / "step-00000001"
    layout = json.loads((step / "layout.json").read_text())
    # Ten rows in four parts are 3, 3, 3 and 1, in the order 0, 3, 1, 2; five numbers on two ranks.
    listed = {name: pieces for name, _, _, pieces in layout["listed"]}
    assert {name: {piece[0]: piece[1:] for piece in pieces} for name, pieces in listed.items()} == {
        "permuted": {
            0: [[0, 0], [3, 3]], 3: [[3, 0], [3, 3]], 1: [[6, 0], [3, 3]], 2: [[9, 0], [1, 3]],
        },
        "on two": {0: [[0], [3]], 1: [[3], [2]]},
    }  # fmt: skip
    # Each of the two replicas has half of the large tensors.
    half = 4 // 2 * (LARGE[0] // 2 * LARGE[1] * 4)
    sizes = [(step / f"rank-0000{rank}.safetensors").stat().st_size for rank in range(4)]
    assert all(half < size < half + 4096 for size in sizes)
    for processes, whole in ((4, False), (4, True), (3, True), (1, True)):
        [found] = workers.run(load, processes, [{"place": place, "whole": whole}])
        assert found == [[]] * processes


def test_ranks_with_different_tensors_save_nothing(tmp_path: Path, workers: Workers) -> None:
    place = tmp_path / "checkpoints"
    [said] = workers.run(save, 4, [{"place": str(place), "more_on": 2}])
    assert all("ranks hold different tensors" in why for why in said)
    assert not list(place.glob("step-*/manifest.json"))


@pytest.mark.parametrize(
    ("ranks", "one_group"),
    first_in_gate(3, [(5, 1), (3, 1), (4, 32), (2, 1), (4, 1), (2, 32), (3, 32), (5, 32)]),
)
def test_a_tree_reduces_as_one_group_does(ranks: int, one_group: int, workers: Workers) -> None:
    """Groups of two: five ranks are 0 1, 2 3, 4, then 0 2, 4, then 0 4."""
    case = {"one_group": one_group, "fails": [ranks - 2, ranks - 1]}
    [found] = workers.run(reduce_in_levels, ranks, [case])
    total = sum(range(ranks))
    for rank in found:
        assert rank["sums"] == [total, 10**15 * total]
        assert rank["largest"] == [ranks - 1, 0]
        assert rank["started"] == [total * step for step in range(20)]
        assert rank["none"] is None
        first, why = rank["failure"]
        assert first == ranks - 2
        # As much of it as has room.
        assert why.startswith(f"näher at rank {ranks - 2}: ééé")
        assert 500 < len(why.encode()) <= 512
