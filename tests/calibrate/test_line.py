"""A line through times: exact where there is no noise, honest where there is."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.trials.calibrate.machine.line import fit_line

SIZES = [2.0**power for power in range(16, 25)]


def points(seconds: dict[float, list[float]]) -> list[tuple[float, list[float]]]:
    return list(seconds.items())


def test_a_line_without_noise_is_found_exactly() -> None:
    line = fit_line(points({size: [0.002 + size / 5e8] for size in SIZES}))
    assert line.fixed_s == pytest.approx(0.002)
    assert line.rate == pytest.approx(5e8)
    assert line.r_squared == pytest.approx(1.0)
    assert line.seconds(1e6) == pytest.approx(0.004)
    assert line.rate_interval == pytest.approx((5e8, 5e8), rel=1e-6)


def test_what_passes_at_once_does_not_make_a_link_faster() -> None:
    """A token bucket lets its burst pass for free: the first bytes of every message."""
    rate, burst = 125e6, 500_000
    times = {size: [0.003 + max(0.0, size - burst) / rate] for size in SIZES}
    line = fit_line(points(times))
    assert line.rate == pytest.approx(rate, rel=1e-9)
    # The smallest is what it is: it took no transfer at all.
    assert line.fixed_s == pytest.approx(0.003 - SIZES[0] / rate)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    rate, held = 2e9, 0
    for seed in range(200):
        random = np.random.default_rng(seed)
        times = {
            size: ((0.001 + size / rate) * random.normal(1.0, 0.05, size=8)).tolist()
            for size in SIZES
        }
        low, high = fit_line(points(times)).rate_interval
        held += low <= rate <= high
    assert 175 <= held <= 199


def test_a_fixed_cost_below_zero_is_none() -> None:
    line = fit_line(points({size: [size / 1e9 * (1.0 if size > 1e6 else 0.5)] for size in SIZES}))
    assert line.fixed_s == 0.0


@pytest.mark.parametrize(
    ("times", "why"),
    [
        ({1e6: [0.1, 0.1, 0.1]}, "too few message sizes"),
        ({1e6: [0.1], 2e6: [0.2]}, "too few message sizes"),
        ({1e3: [0.1], 2e3: [0.2], 1e9: [0.3]}, "too few message sizes"),
        ({1e6: [0.3], 2e6: [0.2], 4e6: [0.1]}, "do not grow"),
    ],
)
def test_no_line_is_said(times: dict[float, list[float]], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        fit_line(points(times))
