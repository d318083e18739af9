"""Sample order: every epoch is a permutation, and no process count shows in it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch")

from shardwise.trainer.data.batches import Layout
from shardwise.trainer.data.order import permute, samples_at


@given(st.integers(1, 3000), st.text(max_size=8))
def test_every_key_gives_a_permutation(count: int, key: str) -> None:
    found = permute(np.arange(count, dtype=np.int64), count, key)
    assert sorted(found.tolist()) == list(range(count))


@given(st.integers(2, 10**15), st.lists(st.integers(0, 10**15), min_size=1, max_size=5))
def test_large_ranges_need_no_table(count: int, indices: list[int]) -> None:
    asked = np.asarray([i % count for i in indices], dtype=np.int64)
    found = permute(asked, count, "key")
    assert ((found >= 0) & (found < count)).all()
    assert len(set(found.tolist())) == len(set(asked.tolist()))


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    positions = np.arange(200, dtype=np.int64)
    first = samples_at(positions, 100, seed=0)
    assert sorted(first[:100].tolist()) == sorted(first[100:].tolist()) == list(range(100))
    assert first[:100].tolist() != first[100:].tolist()
    assert first.tolist() != samples_at(positions, 100, seed=1).tolist()
    assert samples_at(positions, 100, 0, shuffle=False).tolist() == [*range(100), *range(100)]


def test_the_order_is_spread_out() -> None:
    # Neighbours in a permutation of n lie n/3 apart on average; a poor one keeps them close.
    found = permute(np.arange(10_000, dtype=np.int64), 10_000, "spread")
    assert abs(np.abs(np.diff(found)).mean() / 10_000 - 1 / 3) < 0.02


@given(st.integers(0, 50), st.sampled_from([(1, 8, 1), (2, 4, 1), (2, 1, 4), (4, 2, 1), (8, 1, 1)]))
def test_a_step_is_the_same_sequences_on_any_number_of_processes(
    step: int, shape: tuple[int, int, int]
) -> None:
    world, micro_batch, accumulate = shape
    layouts = [Layout(rank, world, micro_batch, accumulate, 16) for rank in range(world)]
    positions = [p for layout in layouts for p in layout.positions(step).ravel().tolist()]
    assert sorted(positions) == list(range(step * 8, step * 8 + 8))
