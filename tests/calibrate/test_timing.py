"""Timings: what lies far from the rest is left out, and all of it was really done."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("torch")
import torch

from shardwise.calibrate.machine.timing import LEAST, MOST, WARM_UP, Timing, timed


def test_what_lies_far_from_the_others_is_counted_and_left_out() -> None:
    timing = Timing.of([1.0, 1.01, 0.99, 1.02, 0.98, 5.0])
    assert timing.outliers == 1
    assert 5.0 not in timing.usual
    assert timing.median_s == pytest.approx(1.005)
    assert timing.summary()["repetitions"] == 6
    assert timing.summary()["p90_s"] == 1.02 or timing.summary()["p90_s"] == 5.0


@pytest.mark.parametrize(("seconds", "least", "most"), [(0.03, LEAST, 12), (0.0, MOST, MOST)])
def test_short_work_is_repeated_more_often(seconds: float, least: int, most: int) -> None:
    calls = 0

    def work() -> None:
        nonlocal calls
        calls += 1
        time.sleep(seconds)

    timing = timed(work, torch.device("cpu"))
    assert least <= len(timing.seconds) <= most
    assert calls == len(timing.seconds) + WARM_UP
    assert timing.median_s >= seconds


def test_calls_too_short_for_a_clock_are_timed_together() -> None:
    timing = timed(lambda: time.sleep(0.001), torch.device("cpu"), inner=5)
    assert 0.001 <= timing.median_s < 0.004
