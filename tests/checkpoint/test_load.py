"""What is loaded is what was saved, whatever bit of a checkpoint has flipped since."""

from __future__ import annotations

import errno
import os
import random
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

pytest.importorskip("torch")
import torch

from shardwise.checkpoint.dcp.load import (
    Loaded,
    NoIntactCheckpointError,
    UnreachableError,
    load_last,
)
from shardwise.checkpoint.dcp.save import SaveError, Saver
from shardwise.checkpoint.format.folder import LocalFolder
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.pieces import Tensor
from shardwise.checkpoint.format.storage import LocalStorage


def state(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "weight": torch.randn(31, 17, generator=generator),
        "half": torch.randn(8, generator=generator).to(torch.bfloat16),
        "step": torch.tensor(float(step)),
        "nothing": torch.zeros(0, 4),
    }


def save(place: LocalStorage, *steps: int, keep: int = 0) -> None:
    saver = Saver(place, keep, background=False)
    for step in steps:
        about = Manifest(step=step, world=1, sequences=8 * step, run={}, versions={})
        saver.save(state(step), {}, {}, about)
        saver.wait()


def load(place: LocalStorage) -> tuple[Loaded | None, dict[str, torch.Tensor]]:
    room = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}

    def into(told: Manifest, saved: Mapping[str, Tensor]) -> Mapping[str, torch.Tensor]:
        return room

    return load_last(place, into), room


def same(found: dict[str, torch.Tensor], step: int) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in state(step).items())


def test_the_newest_is_loaded(tmp_path: Path) -> None:
    place = LocalStorage(tmp_path)
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
    place = LocalStorage(tmp_path)
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
    place = LocalStorage(tmp_path)
    save(place, 1, 2)
    (tmp_path / "step-00000001" / "layout.json").unlink()
    (tmp_path / "step-00000002" / "manifest.json").unlink()
    with pytest.raises(
        NoIntactCheckpointError, match=r"step-00000002: .*\n.*step-00000001: layout.json"
    ):
        load(place)


def test_a_step_that_could_not_be_loaded_is_saved_again_beside_it(tmp_path: Path) -> None:
    place = LocalStorage(tmp_path)
    save(place, 1, 2)
    (tmp_path / "step-00000002" / "rank-00000.safetensors").write_bytes(b"")
    assert same(load(place)[1], 1)
    save(place, 2)
    assert same(load(place)[1], 2)
    assert (tmp_path / "step-00000002.broken-1").is_dir()


def test_a_save_that_cannot_begin_costs_only_itself(tmp_path: Path) -> None:
    """The folder cannot be made; once it can, saves are made again."""
    place = LocalStorage(tmp_path / "file" / "checkpoints")
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


@contextmanager
def limited(what: int, most: int) -> Iterator[None]:
    """Limit a resource of this process."""
    soft, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(what, (soft, hard))


@pytest.mark.parametrize("background", [False, True])
def test_a_save_that_fails_leaves_nothing(tmp_path: Path, background: bool) -> None:
    """What it wrote would keep a full disk full."""
    place = LocalStorage(tmp_path)
    save(place, 1)
    saver = Saver(place, 0, background)
    about = Manifest(step=2, world=1, sequences=0, run={}, versions={})
    # Every file may have so many bytes: the tensors do not fit.
    with limited(resource.RLIMIT_FSIZE, 1024):
        saver.save(state(2), {}, {}, about)
        with pytest.raises(SaveError, match="rank 0"):
            saver.wait()
    assert {path.name for path in tmp_path.iterdir()} == {"step-00000001", "latest"}
    assert same(load(place)[1], 1)


NAMES = ("manifest.json", "layout.json", "ranks.bin", "rank-00000.index", "rank-00000.safetensors")


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("broken", NAMES)
def test_an_error_of_the_file_system_is_no_corruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, code: int
) -> None:
    """Loading is tried again, and the newest checkpoint stays the newest."""
    place = LocalStorage(tmp_path)
    save(place, 1, 2)
    assert {path.name for path in (tmp_path / "step-00000002").iterdir()} == set(NAMES)
    inner = LocalFolder.open

    def fail(folder: LocalFolder, name: str) -> BinaryIO:
        if name == broken:
            raise OSError(code, os.strerror(code), name)
        return inner(folder, name)

    monkeypatch.setattr(LocalFolder, "open", fail)
    with pytest.raises(UnreachableError, match=f"step-00000002: rank 0: .*{os.strerror(code)}"):
        load(place)
    monkeypatch.undo()
    loaded, found = load(place)
    assert loaded is not None
    assert loaded.skipped == []
    assert same(found, 2)


def test_too_many_open_files_are_no_corruption(tmp_path: Path) -> None:
    """An error of the real file system, after the checkpoint was opened."""
    place = LocalStorage(tmp_path)
    save(place, 1, 2)
    load(place)  # imports and opens what torch needs
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = {name: torch.zeros_like(tensor) for name, tensor in state(0).items()}

    def into(told: Manifest, saved: Mapping[str, Tensor]) -> Mapping[str, torch.Tensor]:
        free = os.open(os.devnull, os.O_RDONLY)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
        return room

    try:
        with pytest.raises(UnreachableError, match=os.strerror(errno.EMFILE)):
            load_last(place, into)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert same(load(place)[1], 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", ["missing", "short", "folder"])
def test_a_damaged_file_is_corruption(tmp_path: Path, name: str, damage: str) -> None:
    place = LocalStorage(tmp_path)
    save(place, 1, 2)
    file = tmp_path / "step-00000002" / name
    data = file.read_bytes()
    file.unlink()
    if damage == "short":
        file.write_bytes(data[:-1])
    elif damage == "folder":
        file.mkdir()
    loaded, found = load(place)
    assert loaded is not None
    assert len(loaded.skipped) == 1
    assert name in loaded.skipped[0]
    assert same(found, 1)


def test_retention_looks_only_at_what_is_older(tmp_path: Path) -> None:
    """A newer one that is broken is none of those that are kept."""
    place = LocalStorage(tmp_path)
    save(place, 10, 20, 30)
    (tmp_path / "step-00000030" / "manifest.json").unlink()
    save(place, 25, keep=1)
    assert place.steps() == [25, 30]
    assert same(load(place)[1], 25)
    save(place, 26, 27, keep=2)
    assert place.steps() == [26, 27, 30]


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 5, 6])
def test_as_many_stay_as_are_to_be_kept(tmp_path: Path, keep: int) -> None:
    place = LocalStorage(tmp_path)
    for saved in range(1, 6):
        save(place, saved, keep=keep)
        assert place.steps() == list(range(max(1, saved - keep + 1), saved + 1))
