"""Checkpoints of real processes: to the bit under any strategy, and never one that is broken."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.workers import Workers

pytest.importorskip("torch")
import torch

from tests.distributed.checkpoint_run import digest, run

ZERO3, ZERO2, DDP, SINGLE = ({"kind": kind} for kind in ("zero3", "zero2", "ddp", "single"))
HYBRID = {"kind": "zero3", "shard": 2, "replicate": 2}
Ranks = list[dict[str, Any]]


class TestAnyWorld:
    """A chain of runs, each from the checkpoint of the one before."""

    CHAIN = (
        *((2, ZERO2), (1, SINGLE), (3, ZERO3), (4, HYBRID), (4, DDP), (3, ZERO2), (2, DDP)),
        *((4, ZERO3), (4, ZERO3)),
    )

    def test_every_tensor_is_the_same_to_the_bit(self, tmp_path: Path, workers: Workers) -> None:
        place = str(tmp_path / "checkpoints")
        first = {"do": "save", "strategy": ZERO3, "place": place, "steps": [1]}
        [saved] = workers.run(run, 4, [first])
        loads: list[Ranks] = []
        for step, (world, strategy) in enumerate(self.CHAIN, start=2):
            case = {"do": "load", "strategy": strategy, "place": place, "save": step}
            loads += workers.run(run, world, [case])
        original = saved[0]["1"]
        assert any(name.endswith("exp_avg_sq") for name in original)
        assert any(name.endswith("table.weight") for name in original)
        assert any(name.endswith("stacked.exp_avg") for name in original)
        assert any(name.endswith("seen") for name in original)
        before = 4
        for number, ranks in enumerate(loads):
            assert len(ranks) == self.CHAIN[number][0]
            for rank, found in enumerate(ranks):
                assert found["step"] == number + 1
                assert found["passed_over"] == []
                assert found["digests"] == original, f"link {number} of the chain, rank {rank}"
                # What is a rank's own comes back only where there are as many ranks.
                assert found["mark"] == (rank + 40 if len(ranks) == before else None)
            before = len(ranks)


@pytest.fixture(scope="module")
def full_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    """A disk with room for one step and a half, where this user may mount one."""
    folder = tmp_path_factory.mktemp("disk")
    options = ["-t", "tmpfs", "-o", "size=700k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(["mount", *options], capture_output=True, check=False, timeout=20)
    except FileNotFoundError:
        done = None
    if done is None or done.returncode:
        yield None
        return
    yield folder / "checkpoints"
    subprocess.run(["umount", "-l", str(folder)], check=True, timeout=20)


@pytest.fixture(scope="module")
def written(
    full_disk: Path | None, workers: Workers, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Ranks]]:
    """What two processes found while they saved in every way, and the folder they saved in."""
    folder = tmp_path_factory.mktemp("written")
    fail: dict[str, Any] = {"do": "fail", "background": False, "small_on": 1}
    cases: dict[str, dict[str, Any]] = {
        "two steps": {"do": "save", "steps": [1, 2]},
        "overtaken": {"do": "overtake"},
        "overtaken, loaded": {"do": "load", "place": str(folder / "overtaken")},
        "at once": fail,
        "background": {**fail, "background": True},
    }
    if full_disk is not None:
        cases["full disk"] = {**fail, "small_on": None, "place": str(full_disk)}
    all_cases = [{"strategy": ZERO3, "place": str(folder / n), **c} for n, c in cases.items()]
    return folder, dict(zip(cases, workers.run(run, 2, all_cases), strict=True))


@pytest.fixture(scope="module")
def two_steps(written: tuple[Path, dict[str, Ranks]]) -> tuple[Path, dict[str, dict[str, str]]]:
    """Where two steps of two processes are, and the digests of each."""
    folder, results = written
    digests = results["two steps"][0]
    assert digests["1"] != digests["2"]
    return folder / "two steps", digests


def flip_a_bit(place: Path) -> None:
    path = place / "step-00000002" / "rank-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(place: Path) -> None:
    path = place / "step-00000002" / "rank-00001.safetensors"
    os.truncate(path, path.stat().st_size - 4096)


def lose(name: str) -> Callable[[Path], None]:
    return lambda place: (place / "step-00000002" / name).unlink()


def swap(place: Path) -> None:
    one, other = (place / "step-00000002" / f"rank-0000{rank}.safetensors" for rank in (0, 1))
    one.rename(aside := one.with_suffix(".aside"))
    other.rename(one)
    aside.rename(other)


def take_an_older(name: str) -> Callable[[Path], object]:
    return lambda place: shutil.copy(place / "step-00000001" / name, place / "step-00000002" / name)


def zero_a_page(place: Path) -> None:
    path = place / "step-00000002" / "rank-00000.safetensors"
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2 // 4096 * 4096)
        file.write(bytes(4096))


def link_elsewhere(place: Path) -> None:
    path = place / "step-00000002" / "rank-00000.safetensors"
    path.rename(outside := place.parent / "outside.safetensors")
    path.symlink_to(outside)


# What was done to the newest checkpoint, and what must be said of it.
BROKEN: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "flipped bit": (flip_a_bit, ("rank-00001.safetensors", "does not match its checksum")),
    "zeroed page": (zero_a_page, ("rank-00000.safetensors", "does not match its checksum")),
    "truncated": (cut, ("rank-00001.safetensors", "bytes")),
    "missing shard": (
        lose("rank-00001.safetensors"),
        ("rank-00001.safetensors", "is missing"),
    ),
    "missing manifest": (lose("manifest.json"), ("manifest.json", "is missing")),
    "missing index": (lose("rank-00001.index"), ("rank-00001.index", "is missing")),
    "missing layout": (lose("layout.json"), ("layout.json", "is missing")),
    "missing table": (lose("ranks.bin"), ("ranks.bin", "is missing")),
    "swapped": (swap, ("rank-0000", ".safetensors")),
    "older shard": (
        take_an_older("rank-00000.safetensors"),
        ("rank-00000.safetensors", "does not match its checksum"),
    ),
    "older index": (take_an_older("rank-00001.index"), ("rank-00001.index", "checksum")),
    "older table": (take_an_older("ranks.bin"), ("ranks.bin", "checksum")),
    "link": (link_elsewhere, ("rank-00000.safetensors", "symbolic link")),
}


@pytest.fixture(scope="module")
def loaded(
    two_steps: tuple[Path, Any], workers: Workers, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Ranks]:
    folder = tmp_path_factory.mktemp("broken")
    cases = []
    for what, (damage, _) in BROKEN.items():
        place = folder / what / "checkpoints"
        shutil.copytree(two_steps[0], place)
        damage(place)
        cases.append({"do": "load", "strategy": ZERO3, "place": str(place)})
    shutil.copytree(two_steps[0], whole := folder / "whole")
    shutil.copytree(two_steps[0], hopeless := folder / "hopeless")
    for step in ("1", "2"):
        (hopeless / f"step-0000000{step}" / "manifest.json").unlink()
    cases += (
        {"do": "load", "strategy": ZERO3, "place": str(place)}
        for place in (whole, hopeless, folder / "empty")
    )
    names = [*BROKEN, "whole", "hopeless", "empty"]
    return dict(zip(names, workers.run(run, 2, cases), strict=True))


class TestBroken:
    """The newest checkpoint is broken; the one before is loaded, and the reason is told."""

    @pytest.mark.parametrize("what", BROKEN)
    def test_the_one_before_is_loaded(
        self, what: str, loaded: dict[str, Ranks], two_steps: tuple[Path, Any]
    ) -> None:
        one, other = loaded[what]
        assert one["step"] == other["step"] == 1
        assert one["digests"] == other["digests"] == two_steps[1]["1"]
        assert one["passed_over"] == other["passed_over"]
        (why,) = one["passed_over"]
        assert why.startswith("step-00000002: ")
        for words in BROKEN[what][1]:
            assert words in why
        if why.endswith("does not match its checksum"):
            tensor = why.split(": ")[-2].partition(" at ")[0]
            assert tensor in two_steps[1]["2"]

    def test_what_is_whole_is_loaded(
        self, loaded: dict[str, Ranks], two_steps: tuple[Path, Any]
    ) -> None:
        for found in loaded["whole"]:
            assert found["step"] == 2
            assert found["passed_over"] == []
            assert found["digests"] == two_steps[1]["2"]

    def test_nothing_whole_is_an_error_and_nothing_at_all_is_none(
        self, loaded: dict[str, Ranks]
    ) -> None:
        for found in loaded["hopeless"]:
            assert found["nothing"].count("manifest.json is missing") == 2
            assert found["nothing"].index("step-00000002") < found["nothing"].index("step-00000001")
        assert loaded["empty"] == [{}, {}]


class TestFailedSave:
    """A save that fails says so on every rank, and costs no step that was there."""

    @pytest.mark.parametrize("how", ["at once", "background"])
    def test_a_rank_that_cannot_write(
        self, how: str, written: tuple[Path, dict[str, Ranks]]
    ) -> None:
        for found in written[1][how]:
            assert "rank 1" in found["said"]
            assert os.strerror(errno.EFBIG) in found["said"]
            assert found["loaded"]["step"] == 1
            assert found["loaded"]["passed_over"] == []
            assert found["loaded"]["digests"] == found["first"]

    @pytest.mark.parametrize("how", ["at once", "background"])
    def test_the_next_save_succeeds(self, how: str, written: tuple[Path, dict[str, Ranks]]) -> None:
        for found in written[1][how]:
            assert found["loaded_then"]["step"] == 3
            assert found["loaded_then"]["digests"] == found["third"] != found["first"]
        left = {path.name for path in (written[0] / how).iterdir()}
        assert left == {"step-00000001", "step-00000003", "latest"}

    def test_a_full_disk(
        self, full_disk: Path | None, written: tuple[Path, dict[str, Ranks]]
    ) -> None:
        if full_disk is None:
            pytest.skip("needs the right to mount a small disk")
        for found in written[1]["full disk"]:
            assert os.strerror(errno.ENOSPC) in found["said"]
            assert found["loaded"]["step"] == 1
            assert found["loaded"]["digests"] == found["first"]


def test_what_is_saved_in_the_background_is_what_was_there(
    written: tuple[Path, dict[str, Ranks]],
) -> None:
    pairs = zip(written[1]["overtaken"], written[1]["overtaken, loaded"], strict=True)
    for before, after in pairs:
        assert after["step"] == 2
        assert before["2"] != before["after 2"]
        assert after["digests"] == before["2"]


def test_torch_reads_the_files_by_itself(two_steps: tuple[Path, dict[str, Any]]) -> None:
    """As safetensors files that say which part of a tensor each is."""
    pytest.importorskip("safetensors")
    from torch.distributed.checkpoint import load
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    place, digests = two_steps
    reader = HuggingFaceStorageReader(str(place / "step-00000002"))
    known: dict[str, Any] = reader.read_metadata().state_dict_metadata
    room = {name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in known.items()}  # fmt: skip
    load(room, storage_reader=reader, no_dist=True)
    assert digests["2"].items() <= {name: digest(tensor) for name, tensor in room.items()}.items()
