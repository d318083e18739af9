"""`shardwise memory` as a command: three lines that say it, exit codes, JSON, one screen."""

from __future__ import annotations

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
    lines = done.stdout.splitlines()
    assert lines[:3] == [
        "Peak: 24.00 MiB allocated, 40.00 MiB reserved; only 2.00 MiB (5%) left.",
        "train.py:3 main holds 100% of it; by kind: unknown 100%.",
        # 16 of 40 MiB.
        "Change: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True (40% unused).",
    ]
    assert max(len(line) for line in lines) <= 80
    assert "Device 1: peak 1.00 MiB; --device 1 shows it." in lines


def test_a_leak_is_named_by_file_and_line(tmp_path: Path) -> None:
    done = shardwise("memory", write(tmp_path / "leak.pickle", training(8, leak=4096, names=True)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[2] == (
        "Change: train.py:33 log keeps 4.00 KiB more each step; drop what refers to it."
    )


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
    assert found["headroom_bytes"] == (1 << 30) - MIB
    assert found["curve"]["allocated_bytes"] == [0, MIB]
    assert found["holders"][0]["file"] == PLAIN[0]["filename"]


def test_a_file_that_asks_for_code_is_one_sentence_and_2(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path / 'ran'}",)

    done = shardwise("memory", write(tmp_path / "evil.pickle", Evil()))
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert "asks to run code (STACK_GLOBAL posix.system)" in line
    assert not (tmp_path / "ran").exists()


def test_what_cannot_be_meant_is_one_sentence(fragmented: str) -> None:
    with pytest.raises(SpecError, match="devices are: 0, 1"):
        memory([Path(fragmented)], device=7)
    with pytest.raises(SpecError, match="capacity: unknown unit"):
        memory([Path(fragmented)], capacity="80 apples")
    with pytest.raises(SpecError, match="more than nothing"):
        memory([Path(fragmented)], capacity="0GiB")
