"""DDP's buckets in time: everything is reduced once, and the head leaves first where it can."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.predict.configurations import Configurations
from shardwise.predict.program.events import ROOT_UNIT, Run
from shardwise.predict.program.step import step_program
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from shardwise.units.load import load_units

RANKS = 4
# What is left when all blocks are done.
END = -2


def messages(vocab: int, **strategy: Any) -> tuple[dict[int, int], int]:
    """Bytes all-reduced after each unit, the root's parts at -1, and the model's parameters.

    What is made after the head and at the end is kept apart by its place in the step.
    """
    sizes = {"layers": 4, "hidden": 256, "heads": 4, "ffn": 704, "vocab": vocab}
    model = ModelSpec.read({"name": "m", "family": "llama", "max_positions": 64, **sizes})
    chosen = Strategy.read({"kind": "ddp", "param_dtype": "fp32", **strategy}).resolve(RANKS, RANKS)
    units = load_units(model, 64, chosen)
    program = step_program(units, Configurations.of([chosen]), apart=True)
    found: dict[int, int] = {}
    backward = False
    for event in program:
        if isinstance(event, Run):
            backward |= event.name == "backward" and event.unit != ROOT_UNIT
            if event.work == "all-reduce":
                assert event.message is not None
                place = END if event.unit == ROOT_UNIT and backward else event.unit
                found[place] = found.get(place, 0) + int(event.message.bytes[0])
    return found, units.numel


@pytest.mark.parametrize("vocab", [512, 4096, 65536])
@pytest.mark.parametrize("bucket", [None, 1, 4, 100])
def test_every_gradient_is_reduced_once(vocab: int, bucket: float | None) -> None:
    found, numel = messages(vocab, **({"ddp_bucket_mib": bucket} if bucket else {}))
    assert sum(found.values()) == 4 * numel


def test_a_head_that_fills_the_first_bucket_leaves_before_any_block() -> None:
    # 4096 x 256 in fp32: 4 MiB. The norm before it waits for the rest, which is below 25 MiB.
    found, _ = messages(4096)
    assert found[ROOT_UNIT] == 4 * 4096 * 256
    assert set(found) == {ROOT_UNIT, END}


def test_a_small_head_waits_for_a_block() -> None:
    # Half a MiB: the last block fills the first bucket, of 1 MiB, with it.
    found, _ = messages(512)
    assert set(found) == {3, END}


def test_a_size_that_was_asked_for_holds_for_the_first_too() -> None:
    found, _ = messages(4096, ddp_bucket_mib=6)
    assert ROOT_UNIT not in found
    assert 3 in found


def test_sharded_gradients_have_no_buckets() -> None:
    found, _ = messages(4096, kind="zero3", shard=2, replicate=2)
    assert set(found) == {0, 1, 2, 3, END}
