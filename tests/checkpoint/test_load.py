"""What is loaded is what was saved, whatever bit of a checkpoint has flipped since."""

from __future__ import annotations

import random
from collections.abc import Mapping
from pathlib import Path

import pytest

pytest.importorskip("torch")
import torch

from shardwise.checkpoint.dcp.load import Loaded, NoIntactCheckpointError, load_last
from shardwise.checkpoint.dcp.save import SaveError, Saver
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.pieces import Tensor
from shardwise.checkpoint.format.place import LocalPlace


def state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(31, 17, generator=generator),
        "half": torch.randn(8, generator=generator).to(torch.bfloat16),
        "step": torch.tensor(float(step)),
        "nothing": torch.zeros(0, 4),
    }


def save(place: LocalPlace, *steps: int, keep: int = 0) -> None:
    saver = Saver(place, keep, background=False)
    for step in steps:
        about = Manifest(step=step, world=1, sequences=8 * step, run={}, versions={})
        saver.save(state(step), {}, {}, about)
        saver.wait()


def load(place: LocalPlace) -> tuple[Loaded | None, dict[str, torch.Tensor]]:
    room = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}

    def into(told: Manifest, saved: Mapping[str, Tensor]) -> Mapping[str, torch.Tensor]:
        return room

    return load_last(place, into), room


def same(found: dict[str, torch.Tensor], step: int) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in state(step).items())


def test_the_newest_is_loaded(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    assert load(place)[0] is None
    save(place, 1, 2, 3, keep=2)
    assert place.steps() == [2, 3]
    assert (tmp_path / "latest").read_text() == "step-00000003\n"
    loaded, found = load(place)
    assert loaded is not None
    assert (loaded.manifest.step, loaded.manifest.sequences, loaded.skipped) == (3, 24, [])
    assert same(found, 3)


def test_no_flipped_bit_is_ever_loaded(tmp_path: Path) -> None:
    """Anywhere in any file of the newest: the one before is loaded, and the file is named."""
    place = LocalPlace(tmp_path)
    save(place, 1, 2)
    files = sorted((tmp_path / "step-00000002").iterdir())
    whole = {file: file.read_bytes() for file in files}
    chance = random.Random(7)
    for _ in range(200):
        file = chance.choices(files, [len(whole[one]) for one in files])[0]
        flipped = bytearray(whole[file])
        flipped[chance.randrange(len(flipped))] ^= 1 << chance.randrange(8)
        file.write_bytes(flipped)
        loaded, found = load(place)
        assert loaded is not None
        assert loaded.manifest.step == 1
        assert same(found, 1)
        assert file.name in loaded.skipped[0]
        file.write_bytes(whole[file])
    assert same(load(place)[1], 2)


def test_where_none_is_whole_every_one_is_told(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    save(place, 1, 2)
    (tmp_path / "step-00000001" / "layout.json").unlink()
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(
        NoIntactCheckpointError, match=r"step-00000002: .*\n.*step-00000001: layout.json"
    ):
        load(place)


def test_a_step_that_could_not_be_loaded_is_saved_again_beside_it(tmp_path: Path) -> None:
    place = LocalPlace(tmp_path)
    save(place, 1, 2)
    (tmp_path / "step-00000002" / "rank-00000.safetensors").write_bytes(b"")
    assert same(load(place)[1], 1)
    save(place, 2)
    assert same(load(place)[1], 2)
    assert (tmp_path / "step-00000002.broken-1").is_dir()


def test_a_save_that_cannot_begin_costs_only_itself(tmp_path: Path) -> None:
    """The folder cannot be made; once it can, saves are made again."""
    place = LocalPlace(tmp_path / "file" / "checkpoints")
    (tmp_path / "file").write_text("in the way")
    saver = Saver(place, 0, background=False)

    def attempt(step: int) -> None:
        about = Manifest(step=step, world=1, sequences=0, run={}, versions={})
        saver.save(state(step), {}, {}, about)
        saver.wait()

    for step in (1, 2):
        with pytest.raises(SaveError, match="rank 0"):
            attempt(step)
    (tmp_path / "file").unlink()
    attempt(3)
    assert same(load(place)[1], 3)


def test_retention_looks_only_at_what_is_older(tmp_path: Path) -> None:
    """A newer one that is broken is none of those that are kept."""
    place = LocalPlace(tmp_path)
    save(place, 10, 20, 30)
    (tmp_path / "step-00000030" / "manifest.json").unlink()
    save(place, 25, keep=1)
    assert place.steps() == [25, 30]
    assert same(load(place)[1], 25)
    save(place, 26, 27, keep=2)
    assert place.steps() == [26, 27, 30]


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 5, 6])
def test_as_many_stay_as_are_to_be_kept(tmp_path: Path, keep: int) -> None:
    place = LocalPlace(tmp_path)
    for saved in range(1, 6):
        save(place, saved, keep=keep)
        assert place.steps() == list(range(max(1, saved - keep + 1), saved + 1))
