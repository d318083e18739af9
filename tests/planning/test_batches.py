"""Micro-batch and accumulation against arithmetic on whole numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.planning.batches import (
    BATCH_TOLERANCE,
    LEAST_SEQUENCES,
    USUAL_BATCH,
    USUAL_MICRO_BATCH,
    Batch,
    UnevenBatchError,
    batches,
    batches_between,
    coarse_batches,
)
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.lookup import find_cluster
from shardwise.spec.record import SpecError

SEQ_LEN = 1024


def cluster(devices: int) -> ClusterSpec:
    return find_cluster(f"{devices}xH100-SXM")


def job(sequences: float, devices: int) -> Job:
    return Job(seq_len=SEQ_LEN, global_batch=round(sequences * SEQ_LEN * devices))


@given(st.integers(1, 400), st.sampled_from([1, 2, 8]))
def test_every_divisor_is_a_choice(sequences: int, devices: int) -> None:
    found = {
        (b.micro_batch, b.accumulate) for b in batches(job(sequences, devices), cluster(devices))
    }
    divisors = [size for size in range(1, sequences + 1) if sequences % size == 0]
    assert found >= {(size, sequences // size) for size in divisors}


@given(st.floats(LEAST_SEQUENCES, 300), st.sampled_from([1, 2, 8]))
def test_batches_are_within_the_tolerance_or_refused(sequences: float, devices: int) -> None:
    asked = job(sequences, devices)
    wanted = (asked.global_batch or 0) / (SEQ_LEN * devices)
    # The closest whole number of sequences, whatever it is made of.
    closest = min(abs(max(1, n) / wanted - 1) for n in (math.floor(wanted), math.ceil(wanted)))
    if closest > BATCH_TOLERANCE + 1e-9:
        with pytest.raises(UnevenBatchError) as refused:
            batches(asked, cluster(devices))
        near = refused.value.neighbours
        assert all(tokens % (SEQ_LEN * devices) == 0 for tokens in near)
        assert all(abs(tokens - (asked.global_batch or 0)) < SEQ_LEN * devices for tokens in near)
        return
    found = batches(asked, cluster(devices))
    assert found
    for batch in found:
        deviation = abs(batch.micro_batch * batch.accumulate / wanted - 1)
        assert deviation == pytest.approx(batch.deviation, abs=1e-12)
        assert deviation <= BATCH_TOLERANCE + 1e-6
    # The first pass keeps every one of the closest, and never adds any.
    first = coarse_batches(found, asked=True)
    least = min(batch.deviation for batch in found)
    assert set(first) <= set(found)
    assert set(first) >= {batch for batch in found if batch.deviation == least}


@given(st.integers(1, 200), st.sampled_from([1, 2, 8]))
def test_without_tolerance_batches_are_exact(sequences: int, devices: int) -> None:
    found = batches(job(sequences, devices), cluster(devices), tolerance=0)
    assert {b.micro_batch * b.accumulate for b in found} == {sequences}


def test_what_is_not_exact_names_its_neighbours() -> None:
    with pytest.raises(SpecError, match="507,904 or 524,288"):
        batches(
            Job(seq_len=1024, global_batch=512_000),
            find_cluster("2x8xH100-SXM@400Gbps"),
            tolerance=0,
        )


def test_less_than_a_sequence_per_device_is_refused() -> None:
    with pytest.raises(SpecError, match="fewer than one sequence.*at most 4 devices"):
        batches(Job(seq_len=4096, global_batch=4 * 4096), cluster(8))


def test_what_nobody_asked_for_stays_within_usual_practice() -> None:
    sizes = [s.micro_batch for s in batches(Job(seq_len=4096), cluster(8))]
    assert sizes == [1, 2, 3, 4, 6, 8, 12, 16]
    many = batches(Job(seq_len=4096), find_cluster("64x8xH100-SXM@400Gbps"))
    assert [s.micro_batch for s in many] == [1, 2]
    assert USUAL_BATCH == 2 * 512 * 4096
    beyond = batches(Job(seq_len=8192), find_cluster("512x8xH100-SXM@400Gbps"))
    assert [tuple(s) for s in beyond] == [(1, 1, 0.0)]
    short = batches(Job(seq_len=128), cluster(1))
    assert max(s.micro_batch for s in short) * 128 == USUAL_MICRO_BATCH


def test_the_first_pass_takes_round_numbers_and_the_second_those_between() -> None:
    sizes = [Batch(size, 1) for size in range(1, 513)]
    first = [s.micro_batch for s in coarse_batches(sizes, asked=False)]
    assert first[:10] == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]
    inside = batches_between(sizes, 64, 96, most=6)
    assert all(64 < s.micro_batch < 96 for s in inside)
