"""`shardwise memory` as a command: three lines that say it, exit codes, JSON, one screen."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from shardwise.cli.memory import memory
from shardwise.spec.record import SpecError
from tests.command import shardwise
from tests.observe.memory.build import MIB, PLAIN, block, event, segment, snapshot, training
from tests.screens import assert_screen


def write(path: Path, data: Any) -> str:
    path.write_bytes(pickle.dumps(data))
    return str(path)


@pytest.fixture
def fragmented(tmp_path: Path) -> str:
    """40 MiB reserved, 24 of them allocated at the peak; two devices, the second emptier."""
    pieces = [block(0x1000, 24 * MIB), block(0x2000, 16 * MIB, "inactive")]
    return write(
        tmp_path / "snapshot.pickle",
        snapshot([segment(pieces), segment([block(0x1000, 1 * MIB)], device=1)],
                 [event("alloc", 0x1000, 24 * MIB, time=7)], [event("alloc", 0x1000, 1 * MIB)]),
    )  # fmt: skip


def test_the_first_lines_say_peak_holder_and_change(fragmented: str) -> None:
    done = shardwise("memory", fragmented, "--capacity", "42MiB")
    assert done.returncode == 0, done.stderr
    assert_screen("memory-fragmented", done.stdout)
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    told = json.loads(shardwise("memory", fragmented, "--capacity", "42MiB", "--json").stdout)
    verdict = told["memories"][0]["verdict"]
    # 24 of 40 MiB reserved are allocated; 2 of 42 MiB are less than a tenth.
    assert verdict == {
        "cause": "fragmentation",
        "bytes": 16 * MIB,
        "headroom_bytes": 2 * MIB,
        "headroom_is_low": True,
    }


def test_a_leak_is_named_by_file_and_line(tmp_path: Path) -> None:
    done = shardwise("memory", write(tmp_path / "leak.pickle", training(8, leak=4096, names=True)))
    assert done.returncode == 0, done.stderr
    assert_screen("memory-leak", done.stdout)


def test_the_screen_of_a_real_snapshot(shared: Path) -> None:
    path = shared / "traces" / "memory" / "vanilla_ce_snapshot.pickle"
    if not path.is_file():
        pytest.skip("needs the snapshot in the shared folder")
    done = shardwise("memory", str(path), "--capacity", "80GiB")
    assert done.returncode == 0, done.stderr
    assert_screen("memory-real-loss", done.stdout)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("missing.pickle", None, "cannot read"),
        ("folder", "folder", "no memory.json"),
        ("other.pickle", pickle.dumps({"answer": 42}), "not a memory snapshot"),
        ("cut.pickle", pickle.dumps(training(4))[:200], "cut.pickle"),
        (
            "cut.raw.json.gz",
            gzip.compress(json.dumps([[n, 2, n * n, 4] for n in range(999)]).encode(), mtime=0)[
                :999
            ],
            "truncated",
        ),
        ("trace.json", b'{"traceEvents": []}', "neither a raw memory timeline"),
    ],
)
def test_a_wrong_input_is_one_sentence_and_exit_2(
    tmp_path: Path, name: str, content: bytes | str | None, said: str
) -> None:
    path = tmp_path / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content == "folder":
        path.mkdir()
    done = shardwise("memory", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.strip().splitlines()
    assert str(path) in line
    assert said in line


def test_json_holds_the_same_for_the_device_asked_for(fragmented: str) -> None:
    done = shardwise(
        "memory", fragmented, "--device", "1", "--json", "--capacity", "1GiB", "--top", "1"
    )
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["memories"]
    assert found["device"] == 1
    assert found["peak"] == {
        "event": 1, "events": 1, "allocated_bytes": MIB, "reserved_bytes": MIB,
    }  # fmt: skip
    assert found["verdict"]["headroom_bytes"] == (1 << 30) - MIB
    assert found["curve"]["allocated_bytes"] == [0, MIB]
    assert found["holders"][0]["file"] == PLAIN[0]["filename"]


def test_a_file_that_asks_for_code_is_one_sentence_and_2(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    done = shardwise("memory", write(tmp_path / "evil.pickle", Evil()))
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "posix.system" in line
    assert not (tmp_path / "ran").exists()


def test_what_cannot_be_meant_is_one_sentence(fragmented: str) -> None:
    with pytest.raises(SpecError, match="devices 0, 1"):
        memory([Path(fragmented)], device=7)
    with pytest.raises(SpecError, match="capacity: .*apples"):
        memory([Path(fragmented)], capacity="80 apples")
    with pytest.raises(SpecError, match="more than 0"):
        memory([Path(fragmented)], capacity="0GiB")
