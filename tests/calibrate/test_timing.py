"""Timings: what lies far from the rest is left out, and all of it was really done."""

from __future__ import annotations

import time

import pytest

pytest.importorskip("torch")
import torch

from shardwise.trials.calibrate.machine.timing import ENOUGH_S, LEAST, MOST, WARM_UP, Timing, timed


def test_what_lies_far_from_the_others_is_counted_and_left_out() -> None:
    timing = Timing.of([1.0, 1.01, 0.99, 1.02, 0.98, 5.0])
    assert timing.outliers == 1
    assert 5.0 not in timing.usual
    assert timing.median_s == pytest.approx(1.005)
    assert timing.summary()["repetitions"] == 6
    assert timing.summary()["p90_s"] == 1.02 or timing.summary()["p90_s"] == 5.0


class Work:
    """Takes seconds of a clock that nothing else moves."""

    def __init__(self, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds, self.calls = seconds, 0
        clock = "shardwise.trials.calibrate.machine.timing.time.perf_counter"
        monkeypatch.setattr(clock, lambda: self.calls * self.seconds)

    def __call__(self) -> None:
        self.calls += 1


@pytest.mark.parametrize(
    ("seconds", "repetitions"), [(10.0, LEAST), (ENOUGH_S / 8, 8), (1e-6, MOST)]
)
def test_short_work_is_repeated_more_often(
    seconds: float, repetitions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Work(seconds, monkeypatch)
    timing = timed(work, torch.device("cpu"))
    assert timing.seconds == pytest.approx([seconds] * repetitions)
    assert work.calls == repetitions + WARM_UP


def test_calls_too_short_for_a_clock_are_timed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(ENOUGH_S / 80, monkeypatch)
    timing = timed(work, torch.device("cpu"), inner=5)
    assert timing.seconds == pytest.approx([ENOUGH_S / 80] * 16)
    assert work.calls == 5 * (16 + WARM_UP)


def test_a_real_clock_is_read() -> None:
    assert timed(lambda: time.sleep(0.001), torch.device("cpu")).seconds[0] >= 0.001
