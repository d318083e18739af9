"""Calls and bytes of collectives: the law, and the counts measured on torch 2.13 (facts 3.2)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.predict.program.ddp import ddp_buckets
from shardwise.spec import catalogue
from shardwise.units.decoder import decoder_units
from shardwise.units.unit import ModelUnits, Parameter, Unit
from tests.predict.toy import bare_units, resolve, traffic

AG, RS, AR = ("all_gather", "shard"), ("reduce_scatter", "shard"), ("all_reduce", "replicate")
MEASURED = bare_units(36)  # 36 blocks and a root, as in the measured table


def calls(found: dict[tuple[str, str], tuple[int, int]]) -> dict[tuple[str, str], int]:
    return {key: count for key, (count, _) in found.items()}


def test_one_step_as_measured() -> None:
    assert calls(traffic(MEASURED, resolve("zero3", 2))) == {AG: 73, RS: 37}
    assert calls(traffic(MEASURED, resolve("zero2", 2))) == {AG: 37, RS: 37}
    assert traffic(MEASURED, resolve("single", 1)) == {}


def test_accumulation_without_sync_as_measured() -> None:
    # A micro-batch that does not sync: 73 + 0; the one that does: 73 + 37.
    found = traffic(MEASURED, resolve("zero3", 2, accumulate=2, grad_sync="last"))
    assert calls(found) == {AG: 73 + 73, RS: 37}
    # Left gathered by the backward before: 36 + 37.
    kept = {"accumulate": 2, "grad_sync": "last", "reshard_after_backward": False}
    assert calls(traffic(MEASURED, resolve("zero3", 2, **kept))) == {AG: 73 + 36, RS: 37}
    # Not resharded after the forward: 37 + 0, then 37 + 37; or 0 + 37 if left gathered.
    again = {"accumulate": 2, "grad_sync": "last", "reshard_after_backward": True}
    assert calls(traffic(MEASURED, resolve("zero2", 2, **again))) == {AG: 37 + 37, RS: 37}
    assert calls(traffic(MEASURED, resolve("zero2", 2, **kept))) == {AG: 37 + 0, RS: 37}


def test_hybrid_two_by_two_as_measured() -> None:
    units = bare_units(4)
    assert calls(traffic(units, resolve("zero3:2", 4))) == {AG: 9, RS: 5, AR: 5}
    assert calls(traffic(units, resolve("zero2:2", 4))) == {AG: 5, RS: 5, AR: 5}


def test_an_integer_reshard_gathers_again_in_its_smaller_group() -> None:
    found = traffic(bare_units(4), resolve("zero3", 4, reshard_after_forward=2))
    assert calls(found) == {AG: 5, ("all_gather", "reshard"): 4, RS: 5}


def test_bytes_by_hand() -> None:
    units = bare_units(2, rows=10, columns=3, root_rows=7)
    found = traffic(units, resolve("zero3", 4, param_dtype="bf16", reduce_dtype="fp32"))
    # Rows are padded to multiples of 4: 12 and 8.
    block, root = 12 * 3, 8 * 3
    assert found[AG] == (5, 2 * (2 * block + root) + 2 * (2 * block))
    assert found[RS] == (3, 4 * (2 * block + root))


def test_hybrid_bytes_by_hand() -> None:
    units = bare_units(2, rows=8, columns=3, root_rows=8)
    found = traffic(units, resolve("zero3:4", 8, 4, param_dtype="fp32"))
    whole = 3 * 8 * 3
    assert found[RS] == (3, 4 * whole)
    # Across replicas only each device's shard is reduced.
    assert found[AR] == (3, 4 * whole // 4)


def test_two_two_three() -> None:
    """DDP and zero2 move twice the parameters, zero3 three times; all-reduce counts double."""
    units = bare_units(50, root_rows=64)
    psi = units.numel * 4
    moved = {}
    for name in ("ddp", "zero2", "zero3"):
        found = traffic(units, resolve(name, 4, param_dtype="fp32"))
        moved[name] = sum(
            size * (2 if key[0] == "all_reduce" else 1) for key, (_, size) in found.items()
        )
    assert moved["ddp"] == 2 * psi
    assert moved["zero2"] == 2 * psi
    assert moved["zero3"] == pytest.approx(3 * psi, rel=0.02)  # the root is gathered once


def test_gpt2_large_has_109_buckets() -> None:
    units = decoder_units(catalogue.model("gpt2-large"), 1024, "fp32")
    assert ddp_buckets(units, 4).number == 109


def test_buckets_by_hand() -> None:
    mib = 2**18  # fp32 elements
    root = Unit(name="root", parameters=(Parameter(name="e", shape=(3 * mib,)),))
    block = Unit(name="b", parameters=(Parameter(name="w", shape=(mib // 2,)),))
    units = ModelUnits(name="t", seq_len=1, root=root, blocks=(block,) * 5)
    # From the back: two halves fill the first MiB, three halves and the root's 3 MiB the second
    # bucket, which is far from 25 MiB.
    assert ddp_buckets(units, 4).number == 2
    # A size asked for holds for all: two halves, two halves, then one half and the root.
    assert ddp_buckets(units, 4, 1 * 2**20).number == 3
    # Four halves make 2 MiB, the fifth and the root more than that.
    assert ddp_buckets(units, 4, 2 * 2**20).number == 2


@given(
    blocks=st.integers(1, 60),
    accumulate=st.integers(1, 9),
    shard=st.sampled_from([2, 4, 8]),
    replicate=st.sampled_from([1, 2, 4]),
    sync=st.sampled_from(["every", "local", "last"]),
    kind=st.sampled_from(["zero1", "zero2", "zero3"]),
    keep=st.booleans(),
)
def test_the_law(
    blocks: int, accumulate: int, shard: int, replicate: int, sync: str, kind: str, keep: bool
) -> None:
    """Written micro-batch by micro-batch, as the engine does it."""
    strategy = resolve(
        f"{kind}:{shard}",
        shard * replicate,
        accumulate=accumulate,
        grad_sync=sync,
        reshard_after_backward=not keep,
    )
    expected = {AG: 0, RS: 0, AR: 0}
    gathered = [False] * (blocks + 1)
    for micro_batch in range(accumulate):
        last = micro_batch == accumulate - 1
        for unit in range(blocks + 1):  # forward; the last unit is the root
            expected[AG] += not gathered[unit]
            root = unit == blocks
            gathered[unit] = root or kind != "zero3"
        for unit in range(blocks + 1):  # backward
            expected[AG] += not gathered[unit]
            gathered[unit] = keep and not last
            expected[RS] += last or sync != "last"
            expected[AR] += replicate > 1 and (last or sync == "every")
    found = calls(traffic(bare_units(blocks), strategy))
    assert found == {key: count for key, count in expected.items() if count}


@given(
    blocks=st.integers(1, 60),
    accumulate=st.integers(1, 9),
    sync=st.sampled_from(["every", "local", "last"]),
)
def test_the_law_of_ddp(blocks: int, accumulate: int, sync: str) -> None:
    units = bare_units(blocks)
    strategy = resolve("ddp", 4, accumulate=accumulate, grad_sync=sync)
    times = accumulate if sync == "every" else 1
    buckets = ddp_buckets(units, 4).number
    assert traffic(units, strategy) == {AR: (times * buckets, times * 4 * units.numel)}


def test_many_configurations_are_priced_as_one_by_one() -> None:
    from shardwise.predict.configurations import Configurations
    from shardwise.predict.traffic import predict_traffic

    units = bare_units(7)
    rows = [
        resolve(name, 8, 4, accumulate=k)
        for name in ("ddp", "zero1", "zero2", "zero3", "hsdp", "zero3:2")
        for k in (1, 3)
    ]
    together = predict_traffic(units, Configurations.of(rows))
    for index, row in enumerate(rows):
        expected = traffic(units, row)
        summed: dict[tuple[str, str], tuple[int, int]] = {}
        for c in together:
            if c.calls[index]:
                summed[c.op, c.group] = (int(c.calls[index]), int(c.bytes[index]))
        assert summed == expected
