"""Saves by time: early at first, never often, never later than the usual interval."""

from __future__ import annotations

import itertools

import pytest

from shardwise.trainer.save_pace import FIRST_S, MAX_SHARE, SavePace


def saves(pace: SavePace, save_s: float, until: float, step_s: float = 1.0) -> list[float]:
    """The times at which a run of equal steps saves; each save is written in `save_s`."""
    times: list[float] = []
    now = 0.0
    while now < until:
        now += step_s
        busy = bool(times) and now - times[-1] < save_s
        if not busy and pace.is_due(now):
            times.append(now)
            pace.saved(now)
    return times


def test_until_the_usual_interval_a_crash_loses_at_most_half_of_the_run() -> None:
    times = saves(SavePace(15, 0.0, early=True), save_s=0.2, until=3 * 3600, step_s=0.1)
    assert times[0] == pytest.approx(FIRST_S, abs=0.2)
    for before, after in itertools.pairwise(times):
        lost = after - before
        assert lost <= min(after / 2, 900) + 0.3
        assert lost >= FIRST_S
    # Seven saves come before the usual interval, not one per ten seconds.
    assert len(times) == pytest.approx(7 + 3 * 3600 / 900, abs=1)


def test_a_slow_save_is_not_made_early_again_and_again() -> None:
    save_s = 30.0
    times = saves(SavePace(15, 0.0, early=True), save_s, until=3600)
    for before, after in itertools.pairwise(times):
        assert save_s / (after - before) <= MAX_SHARE


def test_a_save_that_takes_longer_than_usual_intervals_keeps_to_them() -> None:
    times = saves(SavePace(15, 0.0, early=True), save_s=600.0, until=3 * 3600)
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert gaps == [901.0] * len(gaps)
    assert len(gaps) > 5


@pytest.mark.parametrize(("minutes", "first"), [(0.0, None), (1.0, 61.0)])
def test_without_early_saves_the_interval_is_what_was_set(
    minutes: float, first: float | None
) -> None:
    times = saves(SavePace(minutes, 0.0, early=False), save_s=0.1, until=600)
    assert times[:1] == ([] if first is None else [first])
    assert len(times) == (0 if first is None else 9)
