"""Two hundred single bits, each of which flips somewhere in a checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from shardwise.checkpoint.foreign.metadata import read_metadata
from shardwise.checkpoint.format.folder import find_folder
from shardwise.checkpoint.format.pieces import Piece
from shardwise.checkpoint.verify.fsck import CheckedCheckpoint, verify_checkpoint
from tests.checkpoint.ours import write_ours

ARRAYS = {
    f"layers.{n}.{part}": np.random.default_rng(n).normal(size=shape).astype(np.float32)
    for n in range(3)
    for part, shape in {"weight": (16, 24), "bias": (24,)}.items()
}


def flips(files: list[Path], count: int, seed: int) -> Iterator[tuple[str, int, CheckedCheckpoint]]:
    """File, byte, and what is found once a bit of it is flipped; every byte is as likely."""
    chance = random.Random(seed)
    sizes = [file.stat().st_size for file in files]
    for _ in range(count):
        [file] = chance.choices(files, weights=sizes)
        at, bit = chance.randrange(file.stat().st_size), chance.randrange(8)
        data = file.read_bytes()
        flipped = bytearray(data)
        flipped[at] ^= 1 << bit
        file.write_bytes(flipped)
        yield file.name, at, verify_checkpoint(find_folder(str(file.parent)))
        file.write_bytes(data)


def holder(pieces: list[Piece], file: str, at: int) -> str | None:
    """Whose byte it is."""
    for piece in pieces:
        if piece.file == file and piece.start <= at < piece.start + piece.length:
            return str(piece)
    return None


@pytest.mark.parametrize("version", [1, 2])
def test_ours(tmp_path: Path, version: int) -> None:
    folder = tmp_path / "ours"
    pieces = write_ours(folder, ARRAYS, version=version)
    assert verify_checkpoint(find_folder(str(folder))).findings == []
    named = 0
    for file, at, found in flips(sorted(folder.iterdir()), 70, seed=1):
        tensor = holder(pieces, file, at)
        named += tensor is not None
        assert [(one.file, one.tensor) for one in found.broken] == [(file, tensor or "")]
    assert named > 30


def test_torchs_own(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint

    folder = tmp_path / "dcp"
    state = {name: torch.from_numpy(array) for name, array in ARRAYS.items()}
    checkpoint.save({**state, "step": 3}, checkpoint_id=str(folder), no_dist=True)
    saved = read_metadata((folder / ".metadata").read_bytes())
    assert verify_checkpoint(find_folder(str(folder))).findings == []
    pieces = [*saved.pieces, *saved.objects]
    for file, at, found in flips(list(folder.glob("*.distcp")), 70, seed=2):
        tensor = holder(pieces, file, at)
        assert tensor is not None
        assert {(one.file, one.tensor) for one in found.broken} == {(file, tensor)}


def test_torchs_metadata_has_no_checksum(tmp_path: Path) -> None:
    """A name that is another name is no contradiction: what is not found is told as such."""
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint

    folder = tmp_path / "dcp"
    state = {name: torch.from_numpy(array) for name, array in ARRAYS.items()}
    checkpoint.save(state, checkpoint_id=str(folder), no_dist=True)
    for _, _, found in flips([folder / ".metadata"], 60, seed=4):
        assert found.broken or any(".metadata" in note for note in found.notes)


def test_safetensors(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.numpy")
    folder = tmp_path / "hf"
    folder.mkdir()
    library.save_file(ARRAYS, folder / "model.safetensors")
    broken = 0
    for file, _, found in flips([folder / "model.safetensors"], 60, seed=3):
        assert not found.verified
        broken += not found.intact
        assert all(one.file == file for one in found.broken)
    # Those of the header; the rest cannot be known.
    assert broken > 0
