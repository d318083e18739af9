"""fsck on checkpoints of three kinds, and on what became of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardwise.checkpoint.format.checksum import BLOCK
from shardwise.checkpoint.format.folder import find_folder
from shardwise.checkpoint.format.manifest import read_manifest, write_manifest
from shardwise.checkpoint.format.paths import UntrustedError
from shardwise.checkpoint.format.pieces import Piece, Tensor
from shardwise.checkpoint.format.storage import LocalStorage, find_storage, name_of
from shardwise.checkpoint.verify import scan
from shardwise.checkpoint.verify.fsck import CheckedCheckpoint, find_checkpoints, verify_checkpoint
from shardwise.checkpoint.verify.opened import open_checkpoint
from shardwise.spec.record import SpecError
from tests.checkpoint.ours import index_v1, named, write_ours
from tests.command import PATIENCE_S, shardwise

ARRAYS = {
    "weight": np.arange(64 * 32, dtype=np.float32).reshape(64, 32),
    "bias": np.arange(64, dtype=np.float32),
    "scale": np.array(2.5, dtype=np.float32),
}


def fsck(folder: Path) -> CheckedCheckpoint:
    return verify_checkpoint(find_folder(str(folder)))


def told(folder: Path) -> list[tuple[str, str, str]]:
    """Without the reasons."""
    return [(one.severity, one.file, one.tensor) for one in fsck(folder).findings]


def broken(folder: Path) -> str:
    return "\n".join(str(one) for one in fsck(folder).broken)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 16
    file.write_bytes(data)


# ---- ours


@pytest.fixture(params=[1, 2])
def ours(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "step-00000010"
    write_ours(folder, ARRAYS, version=request.param)
    return folder


def test_ours_is_intact(ours: Path) -> None:
    found = fsck(ours)
    assert found.findings == []
    assert (found.kind, found.files, found.tensors) == ("shardwise", len(list(ours.iterdir())), 3)
    files = [ours / "rank-00000.safetensors", ours / "rank-00001.safetensors"]
    assert found.bytes == sum(file.stat().st_size for file in files)


def test_the_helper_writes_safetensors(ours: Path) -> None:
    """The format says so; the library must be able to read it."""
    library = pytest.importorskip("safetensors.numpy")
    halves = [library.load_file(ours / f"rank-0000{n}.safetensors")["weight"] for n in (0, 1)]
    assert np.array_equal(np.concatenate(halves), ARRAYS["weight"])


@pytest.mark.parametrize("version", [1, 2])
def test_a_flip_names_the_tensor_and_its_part(tmp_path: Path, version: int) -> None:
    pieces = write_ours(tmp_path / "it", ARRAYS, version=version)
    for piece in pieces:
        file = tmp_path / "it" / piece.file
        flip(file, piece.start + piece.length - 1)
        assert told(tmp_path / "it") == [("broken", piece.file, str(piece))]
        flip(file, piece.start + piece.length - 1)
    assert fsck(tmp_path / "it").intact


def test_the_last_block_of_a_large_tensor(tmp_path: Path) -> None:
    size = 2 * BLOCK + 12
    [piece] = write_ours(tmp_path / "it", {"w": np.zeros(size, dtype=np.uint8)}, files=1)
    assert fsck(tmp_path / "it").findings == []
    flip(tmp_path / "it" / piece.file, piece.start + size - 1)
    assert f"to {piece.start + size:,} have checksum" in broken(tmp_path / "it")


FILES = {
    1: ("manifest.json", "tensors.json", "rank-00000.safetensors"),
    2: ("manifest.json", "layout.json", "ranks.bin", "rank-00001.index", "rank-00000.safetensors"),
}


@pytest.mark.parametrize(("version", "name"), [(v, name) for v in FILES for name in FILES[v]])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "longer", "header", "link"])
def test_damage_of_any_file_is_found(tmp_path: Path, version: int, name: str, damage: str) -> None:
    ours = tmp_path / "step-00000010"
    write_ours(ours, ARRAYS, version=version)
    file = ours / name
    if damage == "missing":
        file.unlink()
    elif damage in ("empty", "cut"):
        os.truncate(file, 0 if damage == "empty" else file.stat().st_size - 1)
    elif damage == "longer":
        with file.open("ab") as opened:
            opened.write(b" ")
    elif damage == "header":
        flip(file, min(20, file.stat().st_size - 1))
    else:
        shutil.move(file, tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    found = fsck(ours)
    assert not found.intact
    assert {one.file for one in found.broken} == {name}


def test_a_lost_file_names_what_is_lost(ours: Path) -> None:
    (ours / "rank-00001.safetensors").unlink()
    [finding] = fsck(ours).broken
    assert finding.file == "rank-00001.safetensors"
    assert "2 tensors such as bias" in finding.why


def test_swapped_files_are_found(ours: Path) -> None:
    first, second = ours / "rank-00000.safetensors", ours / "rank-00001.safetensors"
    first.rename(ours / "x")
    second.rename(first)
    (ours / "x").rename(second)
    assert {one.file for one in fsck(ours).broken} == {first.name, second.name}


def test_a_file_too_many_is_stale(ours: Path) -> None:
    (ours / "sub").mkdir()
    shutil.copy(ours / "rank-00000.safetensors", ours / "sub" / "7.safetensors")
    assert told(ours) == [("stale", "sub/7.safetensors", "")]
    assert fsck(ours).intact
    (ours / "link").symlink_to("/etc/hostname")
    assert ("broken", "link", "") in told(ours)


def rewrite(folder: Path, tensors: list[Tensor], pieces: list[Piece]) -> None:
    """Another index, and a manifest that agrees with it."""
    record = named(folder / "tensors.json", index_v1(tensors, pieces))
    manifest = read_manifest((folder / "manifest.json").read_bytes())
    files = [one for one in manifest.files if one.name != record.name]
    changed = manifest.model_copy(update={"files": (*files, record)})
    (folder / "manifest.json").write_bytes(write_manifest(changed))


def test_an_index_that_lies(tmp_path: Path) -> None:
    folder = tmp_path / "it"
    pieces = write_ours(folder, ARRAYS, version=1)
    tensors = [Tensor(name, "float32", array.shape) for name, array in ARRAYS.items()]
    weight = next(piece for piece in pieces if piece.tensor == "weight")
    others = [piece for piece in pieces if piece is not weight]
    rewrite(folder, tensors, others)
    text = broken(folder)
    assert "tensors.json: weight: 1,024 of 2,048 elements are in no piece" in text
    assert f"bytes {weight.start:,} to {weight.start + weight.length:,} have no checksum" in text
    rewrite(folder, tensors, [*pieces, weight])
    assert "weight: overlaps another tensor" in broken(folder)
    rewrite(folder, tensors, [*others, weight._replace(file="../secret")])
    assert "../secret: is not in manifest.json" in broken(folder)
    rewrite(folder, tensors, [*others, weight._replace(start=10**9)])
    assert "rank-00000.safetensors: is truncated; truncated: weight" in broken(folder)
    rewrite(folder, tensors, pieces)
    assert fsck(folder).findings == []


def test_many_processes_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {f"w{n}": np.full(BLOCK + 5, n, dtype=np.uint8) for n in range(4)}
    pieces = write_ours(tmp_path / "it", arrays, files=1)
    for piece in pieces[1:3]:
        flip(tmp_path / "it" / piece.file, piece.start + piece.length - 1)
    alone = fsck(tmp_path / "it")
    assert [one.tensor for one in alone.findings] == ["w1", "w2"]
    monkeypatch.setattr(scan, "_MIN_PARALLEL", 1)
    monkeypatch.setattr(scan, "_LEAST_TASK", 2**20)
    told: list[int] = []
    together = verify_checkpoint(find_folder(str(tmp_path / "it")), told.append, processes=2)
    assert together == alone
    assert len(told) > 2
    assert sum(told) == alone.bytes


def test_ours_in_an_object_store(ours: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    store = fsspec.filesystem("memory")
    store.put(str(ours), "/fsck/checkpoints/step-00000010", recursive=True)
    try:
        [folder] = find_checkpoints("memory://fsck").folders
        assert verify_checkpoint(folder) == fsck(ours)._replace(url=folder.url)
        place = "/fsck/checkpoints/step-00000010/rank-00001.safetensors"
        data = bytearray(store.cat_file(place))
        data[-1] ^= 1
        store.pipe_file(place, bytes(data))
        [one] = verify_checkpoint(folder).findings
        assert (one.severity, one.file) == ("broken", "rank-00001.safetensors")
    finally:
        store.rm("/fsck", recursive=True)


# ---- where checkpoints are


def test_all_steps_of_a_run_are_found(tmp_path: Path) -> None:
    for step in (20, 100, 3):
        write_ours(tmp_path / "checkpoints" / f"step-{step:08d}", ARRAYS, step=step)
    for name in ("step-00000200.unfinished", "step-00000005.broken2"):
        (tmp_path / "checkpoints" / name).mkdir()
    for place in (tmp_path, tmp_path / "checkpoints"):
        found = find_checkpoints(str(place))
        names = [Path(folder.url).name for folder in found.folders]
        assert names == ["step-00000003", "step-00000020", "step-00000100"]
        assert found.incomplete == ["step-00000005.broken2", "step-00000200.unfinished"]


def test_a_step_without_a_manifest_is_broken(ours: Path) -> None:
    for file in ours.iterdir():
        file.unlink()
    assert broken(ours) == "manifest.json: is missing"


@pytest.mark.parametrize("what", ["missing", "empty", "file", "unfinished"])
def test_nothing_to_check_is_an_error_of_input(tmp_path: Path, what: str) -> None:
    path = tmp_path / "x"
    if what == "file":
        path.write_text("no checkpoint")
    elif what != "missing":
        path.mkdir()
    if what == "unfinished":
        (path / "step-00000010.unfinished").mkdir()
    with pytest.raises(SpecError, match="fsck: "):
        find_checkpoints(str(path))


# ---- torch's own


@pytest.fixture
def dcp(tmp_path: Path) -> Path:
    torch = pytest.importorskip("torch")
    from torch.distributed import checkpoint

    state = {name: torch.from_numpy(array) for name, array in ARRAYS.items()}
    folder = tmp_path / "dcp"
    checkpoint.save({**state, "extra": {"step": 3}}, checkpoint_id=str(folder), no_dist=True)
    return folder


def shard(folder: Path) -> Path:
    [file] = folder.glob("*.distcp")
    return file


def test_what_torch_wrote_is_intact(dcp: Path) -> None:
    found = fsck(dcp)
    assert found.findings == []
    assert (found.kind, found.files, found.tensors) == ("dcp", 2, 3)
    assert found.bytes == shard(dcp).stat().st_size


@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.99])
def test_a_file_of_torch_that_was_cut(dcp: Path, keep: float) -> None:
    size = shard(dcp).stat().st_size
    os.truncate(shard(dcp), int(keep if keep >= 1 else keep * size))
    assert f"{shard(dcp).name}: has " in broken(dcp)
    assert "; truncated: " in broken(dcp)


def test_a_missing_file_of_torch_and_one_too_many(dcp: Path) -> None:
    stray = dcp / "__7_0.distcp"
    shutil.copy(shard(dcp), stray)
    assert told(dcp) == [("stale", stray.name, "")]
    stray.unlink()
    shard(dcp).unlink()
    assert "__0_0.distcp: is missing; lost with it: 4 tensors" in broken(dcp)


def test_names_that_lead_out_are_refused(dcp: Path, tmp_path: Path) -> None:
    data = (dcp / ".metadata").read_bytes()
    name, secret = b"__0_0.distcp", b"../xx.distcp"
    assert len(name) == len(secret)
    shutil.copy(shard(dcp), tmp_path / "xx.distcp")
    (dcp / ".metadata").write_bytes(data.replace(name, secret))
    assert "points outside the checkpoint" in broken(dcp)


def test_links_are_refused(dcp: Path, tmp_path: Path) -> None:
    file = shard(dcp)
    shutil.move(file, tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    assert "is a symbolic link" in broken(dcp)


def test_torch_is_not_needed(dcp: Path, ours: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from shardwise.checkpoint.verify.fsck import verify_checkpoint\n"
        "from shardwise.checkpoint.format.folder import find_folder\n"
        "for path in sys.argv[1:]: assert verify_checkpoint(find_folder(path)).findings == []"
    )
    subprocess.run(
        [sys.executable, "-c", code, str(dcp), str(ours)], check=True, timeout=PATIENCE_S
    )


# ---- the command


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return shardwise("fsck", *words)


def test_the_command_says_it_and_exits_with_it(ours: Path) -> None:
    done = command(str(ours))
    assert (done.returncode, "intact" in done.stdout) == (0, True)
    flip(ours / "rank-00000.safetensors", (ours / "rank-00000.safetensors").stat().st_size - 1)
    done = command(str(ours))
    assert done.returncode == 1
    assert "rank-00000.safetensors: scale" in done.stdout
    done = command(str(ours), "--json")
    assert done.returncode == 1
    [one] = json.loads(done.stdout)["checkpoints"]
    assert (one["intact"], one["findings"][0]["tensor"]) == (False, "scale")
    done = command(str(ours.parent / "nothing"))
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)


# ---- places


def test_a_linked_step_is_refused_and_what_it_points_to_stays(tmp_path: Path) -> None:
    elsewhere, place = tmp_path / "elsewhere", LocalStorage(tmp_path / "checkpoints")
    write_ours(elsewhere, ARRAYS)
    linked = tmp_path / "checkpoints" / name_of(20)
    linked.parent.mkdir()
    linked.symlink_to(elsewhere)
    (folder,) = find_checkpoints(str(tmp_path / "checkpoints")).folders
    assert not verify_checkpoint(folder).intact
    assert "symbolic link" in "\n".join(map(str, verify_checkpoint(folder).broken))
    with pytest.raises(UntrustedError, match="symbolic link"):
        open_checkpoint(place.folder(20))
    # Whoever names the link means it.
    assert fsck(linked).intact
    place.remove(20)
    assert not linked.is_symlink()
    assert fsck(elsewhere).intact


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_save_is_complete_without_a_pointer_to_it(
    scheme: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest").mkdir()
    place = find_storage(f"{scheme}{tmp_path}")
    for step in (10, 20):
        place.begin(step)
        if scheme:  # an object store has no folders to make
            (tmp_path / name_of(step)).mkdir()
        place.commit(step, b"{}")
    assert place.steps() == [10, 20]
    assert "latest" in caplog.text
