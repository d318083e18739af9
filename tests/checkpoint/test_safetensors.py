"""Files of Hugging Face: they hold what they say, and all of them are there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.checkpoint.format.folder import find_folder
from shardwise.checkpoint.verify.fsck import CheckedCheckpoint, find_checkpoints, verify_checkpoint

library = pytest.importorskip("safetensors.numpy")


def fsck(folder: Path) -> CheckedCheckpoint:
    return verify_checkpoint(find_folder(str(folder)))


def broken(folder: Path) -> str:
    return "\n".join(str(one) for one in fsck(folder).broken)


def name(number: int, count: int = 3) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three files of two tensors each, and an index."""
    places = {}
    for number in (1, 2, 3):
        tensors = {f"layer.{number}.{part}": np.ones((4, 3), np.float32) for part in "ab"}
        library.save_file(tensors, tmp_path / name(number))
        places.update(dict.fromkeys(tensors, name(number)))
    index = {"metadata": {"total_size": 288}, "weight_map": places}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def test_whole_is_not_intact_but_unverifiable(folder: Path) -> None:
    found = fsck(folder)
    assert (found.intact, found.verified) == (True, False)
    assert [one.severity for one in found.findings] == ["unverifiable"]
    assert (found.kind, found.files, found.tensors) == ("safetensors", 4, 6)


def test_one_file_alone(folder: Path) -> None:
    [one] = find_checkpoints(str(folder / name(2))).folders
    found = verify_checkpoint(one)
    assert (found.files, found.tensors, found.url) == (1, 2, str(folder / name(2)))
    assert found.intact


@pytest.mark.parametrize("index", [True, False])
def test_missing_files_are_counted(folder: Path, index: bool) -> None:
    (folder / name(1)).unlink()
    if index:
        assert "2 tensors such as layer.1.a" in broken(folder)
    else:
        (folder / "model.safetensors.index.json").unlink()
        assert "1 of 3 files are missing, such as number 1" in broken(folder)


def test_a_tensor_in_two_files(folder: Path) -> None:
    library.save_file({"layer.1.a": np.ones(2, np.float32)}, folder / name(2))
    text = broken(folder)
    assert f"{name(2)}: layer.1.a: is also in {name(1)}" in text
    assert f"{name(2)}: layer.2.b: is missing" in text
    (folder / "model.safetensors.index.json").unlink()
    assert f"{name(2)}: layer.1.a: is also in {name(1)}" in broken(folder)


def test_files_and_tensors_of_another_save_are_stale(folder: Path) -> None:
    library.save_file({"old": np.ones(2, np.float32)}, folder / name(1, 9))
    found = fsck(folder)
    assert found.intact
    assert ("stale", name(1, 9)) in [(one.severity, one.file) for one in found.findings]


def test_links_of_a_cache_are_followed_and_dead_ones_told(folder: Path) -> None:
    blob = folder / "blobs" / "0123"
    blob.parent.mkdir()
    (folder / name(3)).rename(blob)
    (folder / name(3)).symlink_to(blob)
    assert fsck(folder).intact
    blob.unlink()
    assert f"{name(3)}: is a broken link" in broken(folder)


@pytest.mark.parametrize("index", ["[]", "{", '{"weight_map": 3}', '{"weight_map": {"a": "../b"}}'])
def test_an_index_that_is_none(folder: Path, index: str) -> None:
    (folder / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json: " in broken(folder)


def entry(start: int, end: int, **more: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [start, end], **more}


HEADERS: dict[str, tuple[Any, int, str]] = {
    "gap": ({"a": entry(8, 16)}, 16, "'a' leaves a gap"),
    "overlap": ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "'b' overlaps"),
    "more bytes": ({"a": entry(0, 8)}, 9, "9 bytes of tensors, its header says 8"),
    "fewer bytes": ({"a": entry(0, 8)}, 7, "has 7 bytes"),
    "wrong size": ({"a": entry(0, 8, shape=[3])}, 8, "'a' has an invalid"),
    "wrong dtype": ({"a": entry(0, 8, dtype="F33")}, 8, "'a' has an invalid"),
    "dtype of a list": ({"a": entry(0, 8, dtype=["F32"])}, 8, "'a' has an invalid"),
    "negative": ({"a": entry(0, 8, shape=[-2])}, 8, "'a' has an invalid"),
    "huge": ({"a": entry(0, 8, shape=[2**62, 2**62])}, 8, "'a' has an invalid"),
    "true": ({"a": entry(0, 8, shape=[True, 2])}, 8, "'a' has an invalid"),
    "no object": ([1], 0, "not a JSON object"),
    "metadata": ({"__metadata__": {"a": 1}}, 0, "metadata that is not a table"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_cannot_be(tmp_path: Path, case: str) -> None:
    header, size, why = HEADERS[case]
    data = json.dumps(header).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(data).to_bytes(8, "little") + data + bytes(size))
    assert why in broken(tmp_path)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "header of 0 bytes in a file of 0"),
        (b"\xff" * 8, "header of 18,446,744,073,709,551,615 bytes"),
        ((2).to_bytes(8, "little") + b"{]", "not JSON"),
        ((200_000).to_bytes(8, "little") + b"[" * 200_000, "not JSON"),
        ((13).to_bytes(8, "little") + b'{"a":1,"a":2}', "has 'a' twice"),
    ],
)
def test_a_file_that_is_none(tmp_path: Path, data: bytes, why: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    assert why in broken(tmp_path)
