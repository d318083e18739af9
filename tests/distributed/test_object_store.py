"""Checkpoints in an object store: two processes and a server that speaks S3."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from shardwise.checkpoint.format.storage import find_storage
from shardwise.checkpoint.verify.fsck import find_checkpoints, verify_checkpoint
from tests.command import PATIENCE_S
from tests.distributed.launch import free_port
from tests.distributed.workers import Workers

pytest.importorskip("torch")
pytest.importorskip("s3fs")
pytest.importorskip("moto")
pytest.importorskip("flask_cors")
from tests.distributed import checkpoint_run

pytestmark = pytest.mark.nightly

SHARD = "rank-00001.safetensors"
Ranks = list[dict[str, Any]]


def start_server() -> tuple[subprocess.Popen[bytes], str]:
    """A server that answers, and its URL. A free port may be taken before the server has it."""
    for _ in range(3):
        url = f"http://127.0.0.1:{(port := free_port())}"
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + PATIENCE_S
        while server.poll() is None and time.monotonic() < end:
            try:
                urllib.request.urlopen(url, timeout=5).close()
            except OSError:
                time.sleep(0.1)
            else:
                return server, url
        server.kill()
        server.wait(PATIENCE_S)
    raise RuntimeError("no server could be started")


@pytest.fixture(scope="module")
def store() -> Iterator[Any]:
    """A bucket, as fsspec sees it; every process that is started finds it too."""
    import s3fs

    server, url = start_server()
    environment = pytest.MonkeyPatch()
    environment.setenv("AWS_ENDPOINT_URL", url)
    environment.setenv("AWS_ACCESS_KEY_ID", "key")
    environment.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
    try:
        # Others write here too, so nothing may be remembered.
        found = s3fs.S3FileSystem(use_listings_cache=False)
        found.mkdir("bucket")
        yield found
    finally:
        environment.undo()
        server.terminate()
        server.wait(PATIENCE_S)


def run(names: dict[str, dict[str, Any]], workers: Workers) -> dict[str, Ranks]:
    """What both ranks found, by case; each has its own prefix unless it says where."""
    cases = [
        {"strategy": {"kind": "zero3"}, "place": f"s3://bucket/{name}", **case}
        for name, case in names.items()
    ]
    return dict(zip(names, workers.run(checkpoint_run.run, 2, cases), strict=True))


def copy(store: Any, name: str, names: set[str] | None = None) -> str:
    """A copy of the second step of `run` as the third of another prefix, behind the first two."""
    store.copy("bucket/run/", f"bucket/{name}/", recursive=True)
    for path in store.ls("bucket/run/step-00000002", detail=False):
        file = path.rpartition("/")[2]
        if names is None or file in names:
            store.cp_file(path, f"bucket/{name}/step-00000003/{file}")
    return f"bucket/{name}"


@pytest.fixture(scope="module")
def saved(store: Any, workers: Workers) -> dict[str, Ranks]:
    cases: dict[str, dict[str, Any]] = {
        "run": {"do": "save", "steps": [1, 2]},
        "few": {"do": "save", "steps": [1, 2, 3, 4], "keep": 2, "background": True},
    }
    return run(cases, workers)


@pytest.fixture(scope="module")
def loaded(store: Any, saved: dict[str, Ranks], workers: Workers) -> dict[str, Ranks]:
    interrupted = copy(store, "interrupted", {"rank-00000.safetensors", "layout.json"})
    assert store.exists(f"{interrupted}/step-00000003/layout.json")
    corrupt = f"{copy(store, 'corrupt')}/step-00000002/{SHARD}"
    data = bytearray(store.cat_file(corrupt))
    data[len(data) // 2] ^= 1
    store.pipe_file(corrupt, bytes(data))
    store.rm(f"bucket/corrupt/step-00000003/{SHARD}")
    cases: dict[str, dict[str, Any]] = {
        name: {"do": "load"} for name in ("run", "few", "interrupted", "corrupt", "nothing")
    }
    cases["go on"] = {"do": "load", "place": "s3://bucket/interrupted", "save": 5}
    cases["refused"] = {"do": "refuse", "background": True, "place": "s3://no-such-bucket/run"}
    return run(cases, workers)


def test_what_was_saved_is_loaded(saved: dict[str, Ranks], loaded: dict[str, Ranks]) -> None:
    for before, after in zip(saved["run"], loaded["run"], strict=True):
        assert after["step"] == 2
        assert after["passed_over"] == []
        assert after["digests"] == before["2"] != before["1"]


def test_only_as_many_are_kept_as_asked_for(
    store: Any, saved: dict[str, Ranks], loaded: dict[str, Ranks]
) -> None:
    assert find_storage("s3://bucket/few").steps() == [3, 4]
    left = {path.split("/")[2] for path in store.find("bucket/few")}
    assert left == {"step-00000003", "step-00000004", "latest"}
    assert store.cat_file("bucket/few/latest") == b"step-00000004\n"
    assert loaded["few"][0]["digests"] == saved["few"][0]["4"]


def test_a_save_that_was_interrupted_is_no_checkpoint(
    saved: dict[str, Ranks], loaded: dict[str, Ranks]
) -> None:
    for found in loaded["interrupted"]:
        assert found["step"] == 2
        assert found["passed_over"] == []
        assert found["digests"] == saved["run"][0]["2"]


def test_the_next_save_clears_what_was_interrupted(store: Any, loaded: dict[str, Ranks]) -> None:
    assert loaded["go on"][0]["step"] == 2
    assert find_storage("s3://bucket/interrupted").steps() == [1, 2, 5]
    assert not store.exists("bucket/interrupted/step-00000003")


def test_a_corrupt_object_and_a_missing_one_are_passed_over(
    saved: dict[str, Ranks], loaded: dict[str, Ranks]
) -> None:
    for found in loaded["corrupt"]:
        assert found["step"] == 1
        assert found["digests"] == saved["run"][0]["1"]
        missing, corrupt = found["passed_over"]
        assert missing == f"step-00000003: {SHARD} is missing"
        assert corrupt.startswith(f"step-00000002: rank 1: {SHARD}: ")
        assert corrupt.split(": ")[-2].partition(" at ")[0] in saved["run"][0]["2"]


def test_an_empty_prefix_holds_none(loaded: dict[str, Ranks]) -> None:
    assert loaded["nothing"] == [{}, {}]


def test_a_store_that_takes_nothing_is_told_on_every_rank(loaded: dict[str, Ranks]) -> None:
    one, other = loaded["refused"]
    assert one["said"] == other["said"]
    assert one["said"].startswith("Checkpoint not saved: rank 0: ")
    assert "bucket does not exist" in one["said"]


def test_fsck_finds_the_same_objects(loaded: dict[str, Ranks]) -> None:
    folders = find_checkpoints("s3://bucket/corrupt").folders
    checked = [verify_checkpoint(folder) for folder in folders]
    files = [{finding.file for finding in one.findings} for one in checked]
    assert files == [set(), {SHARD}, {SHARD}]
    (corrupt,) = checked[1].findings
    assert "checksum" in corrupt.why
