from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.spec.precision import parse_precision
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy, parse_strategy


def resolved(text: str, devices: int = 16, node_size: int = 8, **settings: object) -> Strategy:
    return Strategy.read({**parse_strategy(text), **settings}).resolve(devices, node_size)


@pytest.mark.parametrize(
    ("text", "kind", "shard", "replicate"),
    [
        ("ddp", "ddp", 1, 16),
        ("zero1", "zero1", 16, 1),
        ("zero2", "zero2", 16, 1),
        ("zero3", "zero3", 16, 1),
        ("ZeRO3", "zero3", 16, 1),
        ("hsdp", "zero3", 8, 2),
        ("zero3:4", "zero3", 4, 4),
    ],
)
def test_shorthands(text: str, kind: str, shard: int, replicate: int) -> None:
    strategy = resolved(text)
    assert (strategy.kind, strategy.shard, strategy.replicate) == (kind, shard, replicate)


def test_defaults_follow_the_kind() -> None:
    assert resolved("zero3").reshard_after_forward is True
    assert resolved("zero2").reshard_after_forward is False
    # What is gathered anyway stays gathered between micro-batches.
    assert resolved("zero2").reshard_after_backward is False
    assert resolved("zero3").reshard_after_backward is True
    assert resolved("ddp").grad_sync == "last"
    assert resolved("zero1").grad_sync == "last"
    assert resolved("zero3").grad_sync == "every"
    # Hybrid sharding reduces inside its groups at once and across them at the end.
    assert resolved("hsdp").grad_sync == "local"


def test_single_is_one_device() -> None:
    assert resolved("single", devices=1).devices == 1
    with pytest.raises(SpecError, match="choose ddp"):
        resolved("single", devices=2)


def test_experts_are_divided_within_the_devices_of_one_copy() -> None:
    """Expert parallelism is a view of shard x context: the number of devices stays."""
    strategy = resolved("zero3:8 ep4")
    assert (strategy.devices, strategy.mesh.states, strategy.expert) == (16, 8, 4)
    assert strategy.shorthand == "zero3:8 ep4"
    assert parse_strategy(strategy.shorthand) == {"kind": "zero3", "shard": 8, "expert": 4}
    assert resolved("zero3:4 cp2 ep8").expert == 8
    assert resolved("hsdp ep8").mesh.states == 8
    assert strategy.as_kind("zero2").expert == 1


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("ddp ep2", {}),
        ("single ep2", {}),
        ("zero3:8 ep3", {}),
        ("zero3 ep32", {}),
        ("hsdp ep16", {}),
        ("zero3 tp2 ep2", {}),
        ("zero3 ep2", {"reshard_after_forward": 2}),
        ("zero3 ep2", {"offload": True}),
    ],
)
def test_what_experts_cannot_be_combined_with(text: str, settings: dict[str, object]) -> None:
    with pytest.raises(SpecError, match="expert"):
        Strategy.read({**parse_strategy(text), **settings}).resolve(16, 8)


def test_degrees_must_fill_the_cluster() -> None:
    with pytest.raises(SpecError, match="groups of 3 do not divide 16 devices; use 1, 2, 4 or 8$"):
        resolved("zero3:3")
    with pytest.raises(
        SpecError, match="shard 4 x replicate 2 = 8 devices, but the cluster has 16"
    ):
        resolved("zero3:4", replicate=2)


def test_an_integer_reshard_must_divide_the_shard_degree() -> None:
    assert resolved("zero3", reshard_after_forward=4).reshard_after_forward == 4
    assert resolved("zero3", reshard_after_forward=16).reshard_after_forward is True
    with pytest.raises(SpecError, match="must divide the shard degree 16"):
        resolved("zero3", reshard_after_forward=5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kind": "zero3", "recompte": "full"},
            "strategy.recompte: unknown key; did you mean 'recompute'",
        ),
        ({"kind": "zerro3"}, "did you mean 'zero3'"),
        ({"kind": "zero3", "micro_batch": 0}, "strategy.micro_batch: must be at least 1"),
        ({"kind": "zero3", "recompute": 1.5}, "strategy.recompute"),
        ({"kind": "zero2", "reshard_after_forward": True}, "choose kind 'zero3'"),
        ({"kind": "ddp", "shard": 4}, "shards nothing"),
        ({"kind": "ddp", "offload": True}, "offload needs sharding"),
        ({"kind": "zero3", "reshard_after_forward": 1}, "at least 2"),
        ({}, "strategy.kind: is required"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        Strategy.read(fields, where="strategy")


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(SpecError) as caught:
        Strategy.read({"kind": "zero9", "micro_batch": -1, "acumulate": 2, "prefetch": 99})
    assert len(caught.value.problems) == 4


@given(st.text(max_size=30))
def test_the_shorthand_parser_never_crashes(text: str) -> None:
    try:
        assert Strategy.read(parse_strategy(text)).kind
    except SpecError as error:
        assert error.problems


@given(
    kind=st.sampled_from(["ddp", "zero1", "zero2", "zero3"]),
    nodes=st.integers(1, 64),
    node_size=st.sampled_from([1, 2, 4, 8]),
    accumulate=st.integers(1, 8),
)
def test_resolving_is_idempotent_and_fills_the_cluster(
    kind: str, nodes: int, node_size: int, accumulate: int
) -> None:
    devices = nodes * node_size
    once = resolved(kind, devices, node_size, accumulate=accumulate)
    assert once.devices == devices
    assert once.resolve(devices, node_size) == once


def test_precision() -> None:
    assert parse_precision("bf16") == {"param_dtype": "bf16", "reduce_dtype": "fp32"}
    with pytest.raises(SpecError, match="did you mean 'bf16'"):
        parse_precision("bf61")
