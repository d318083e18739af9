"""Whether a measurement of the lab may judge a prediction."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("torch")
from benchmarks.lab.quiet import BUSY, Usage, usage, why_not_judged


def test_time_of_other_processes_is_not_judged() -> None:
    """A process of nobody's lab computes for a second of its own time."""
    work = "import time\nwhile time.process_time() < 1: pass"
    before = usage([])
    subprocess.run([sys.executable, "-c", work], check=True)
    after = usage([])
    assert after.busy_s - before.busy_s >= 0.9
    # As if all of it had happened within a second, on however many cores.
    as_long = Usage(before.wall_s + 1, after.busy_s, after.own_s)
    assert why_not_judged(as_long.others(before)) is not None
    assert why_not_judged(BUSY) is None
