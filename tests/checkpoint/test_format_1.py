"""A checkpoint in format 1, as two processes of version 0 saved it, still loads."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from shardwise.checkpoint.dcp.load import Loaded, NoIntactCheckpointError, load_last
from shardwise.checkpoint.format.folder import LocalFolder
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.pieces import Tensor
from shardwise.checkpoint.format.storage import LocalStorage
from shardwise.checkpoint.verify.fsck import verify_checkpoint

PLACE = Path(__file__).parent / "format_1"
STEP = "step-00000004"
# By dimension 0, dimension 1, and not divided; the last of one rank alone.
SAVED = {
    "model.weight": torch.arange(15.0).reshape(5, 3),
    "model.stacked": torch.arange(24).reshape(3, 4, 2),
    "model.bias": torch.arange(7).to(torch.bfloat16),
    "optimizer.weight.step": torch.tensor(4.0),
    "rank.1.mark": torch.tensor([41]),
}


def load(place: Path) -> tuple[Loaded | None, dict[str, torch.Tensor]]:
    room: dict[str, torch.Tensor] = {}

    def into(manifest: Manifest, saved: Mapping[str, Tensor]) -> Mapping[str, torch.Tensor]:
        assert (manifest.version, manifest.world, manifest.sequences) == (1, 2, 32)
        room.update({name: torch.zeros_like(SAVED[name]) for name in saved if name in SAVED})
        return room

    return load_last(LocalStorage(place), into), room


def test_it_loads() -> None:
    loaded, found = load(PLACE)
    assert loaded is not None
    assert (loaded.manifest.step, loaded.skipped) == (4, [])
    assert found.keys() == SAVED.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in SAVED.items())


def test_it_is_intact_and_every_flip_is_found(tmp_path: Path) -> None:
    assert verify_checkpoint(LocalFolder(PLACE / STEP)).findings == []
    shutil.copytree(PLACE / STEP, tmp_path / STEP)
    for file in (tmp_path / STEP).iterdir():
        data = file.read_bytes()
        for at in range(0, len(data), 7):
            file.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
            assert {one.file for one in verify_checkpoint(LocalFolder(tmp_path / STEP)).broken} == {
                file.name
            }
        with pytest.raises(NoIntactCheckpointError, match=file.name):
            load(tmp_path)
        file.write_bytes(data)
