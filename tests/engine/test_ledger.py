"""The curve of bytes alive: every change in its place, bounded, its highest point kept."""

from __future__ import annotations

import gc

import pytest

torch = pytest.importorskip("torch")

from shardwise.engine.ledger import MOST_POINTS, LiveBytes  # noqa: E402


@pytest.fixture(autouse=True)
def nothing_left_over() -> None:
    """Tensors of other tests must not die in the middle of these."""
    gc.collect()


def test_the_curve_follows_what_lives() -> None:
    with LiveBytes(draws=True) as live:
        live.reset()
        first = torch.zeros(1000)
        second = torch.ones(500)
        del first
        third = torch.zeros(10)
        _ = second + second
        live.finish()
    resting = sum(live.curve[0][1].values())
    levels = [sum(terms.values()) - resting for _, terms in live.curve]
    assert levels[:4] == [0, 4000, 6000, 6000 - 4000 + 40]
    # The sum lives on in `_`.
    assert levels[-2:] == [2040 + 2000, 2040 + 2000]
    assert live.peak_bytes - resting == max(levels) == 6000
    assert live.curve_every == 1
    numbers = [at for at, _ in live.curve]
    assert numbers == sorted(numbers)
    assert third.numel() == 10


def test_a_long_curve_is_thinned_and_keeps_its_peak() -> None:
    kept = []
    with LiveBytes(draws=True) as live:
        live.reset()
        for size in range(1, 2 * MOST_POINTS):
            kept.append(torch.empty(size))
            if size == 700:
                highest = torch.empty(1 << 22)
                del highest
        live.finish()
    resting = sum(live.curve[0][1].values())
    levels = [sum(terms.values()) - resting for _, terms in live.curve]
    assert len(levels) <= MOST_POINTS + 1
    assert live.curve_every in (2, 4)
    # All that was kept by then, and the one that was not.
    assert max(levels) == 4 * (700 * 701 // 2) + 4 * (1 << 22)
    assert levels[-1] == 4 * sum(range(1, 2 * MOST_POINTS))
