"""What a call is measured to take is its own, and what it leaves behind ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.forks import Forks

MIB = 1 << 20


def take(megabytes: int) -> None:
    print(len(b"x" * (megabytes * MIB)) // MIB)


def take_in_a_program(megabytes: int) -> None:
    subprocess.run([sys.executable, "-c", f"b'x' * {megabytes * MIB}"], check=True)


def sleep_in_a_program() -> None:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"], check=True)


def test_a_call_is_measured_without_the_memory_of_the_tests(tmp_path: Path) -> None:
    held = b"x" * (500 * MIB)
    with Forks() as forks:
        small = forks.call(f"{__name__}:take", 1, folder=tmp_path)
        large = forks.call(f"{__name__}:take", 200, folder=tmp_path)
        inside = forks.call(f"{__name__}:take_in_a_program", 200, folder=tmp_path)
        again = forks.call(f"{__name__}:take", 1, folder=tmp_path)
    assert len(held) == 500 * MIB
    assert (small.code, small.text) == (0, "1\n")
    assert small.peak_bytes < 100 * MIB
    assert 200 * MIB < large.peak_bytes < 300 * MIB
    assert inside.peak_bytes > 200 * MIB
    assert again.peak_bytes < 100 * MIB


def test_a_call_that_does_not_end_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    start = time.monotonic()
    with Forks() as forks:
        ended = forks.call(f"{__name__}:sleep_in_a_program", folder=tmp_path, seconds=0.5)
    assert (ended.code, ended.text) == (-15, "")
    assert time.monotonic() - start < 300
    for status in Path("/proc").glob("[0-9]*/cwd"):
        try:
            assert os.readlink(status) != str(tmp_path)
        except OSError:
            continue
