"""Clusters of unequal parts, and shares of a step: what is read, written and refused."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest

from shardwise.spec.job import Job
from shardwise.spec.lookup import cluster_from_table, find_cluster, write_cluster
from shardwise.spec.question import describe_run
from shardwise.spec.record import SpecError
from shardwise.spec.run import run_from_dict, write_run
from shardwise.spec.strategy import Strategy

MIXED = "1x8xH100-SXM + 1x8xA100-80GB@200Gbps"


def shares(*parts: tuple[int, int]) -> list[dict[str, int]]:
    return [{"devices": devices, "accumulate": count} for devices, count in parts]


def test_parts_are_one_cluster() -> None:
    cluster = find_cluster(MIXED)
    assert (cluster.devices, cluster.nodes, cluster.devices_per_node) == (16, 2, 8)
    assert cluster.parts is not None
    assert [(part.device.name, part.devices) for part in cluster.parts] == [
        ("H100-SXM", 8),
        ("A100-80GB", 8),
    ]
    assert cluster.network == 25e9
    assert str(cluster) == MIXED
    assert find_cluster(str(cluster)) == cluster
    assert cluster_from_table(tomllib.loads(write_cluster(cluster))) == cluster


def test_the_slowest_network_connects_the_parts() -> None:
    cluster = find_cluster("4x8xH100-SXM@400Gbps + 1x4xA100-80GB@100Gbps")
    assert cluster.network == 12.5e9
    # A node of the whole lies in one node of either part.
    assert (cluster.nodes, cluster.devices_per_node) == (9, 4)
    assert cluster.parts is not None
    alone = cluster.alone(cluster.parts[0])
    assert (alone.nodes, alone.devices_per_node, alone.network) == (4, 8, 50e9)
    assert alone == find_cluster("4x8xH100-SXM@400Gbps")


def test_equal_parts_are_equal_devices() -> None:
    assert find_cluster("1x8xH100-SXM + 1x8xH100-SXM@400Gbps") == find_cluster(
        "2x8xH100-SXM@400Gbps"
    )


@pytest.mark.parametrize(
    "text",
    [
        "1x8xH100-SXM + 1x8xA100-80GB",
        "8xH100-SXM + 8xCPU@10Gbps",
        "8xH100-SXM + @10Gbps",
        "8xH100-SXM + 8xNoSuch@10Gbps",
    ],
)
def test_parts_that_cannot_train_together_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="cluster"):
        find_cluster(text)


def test_shares_are_written_and_read_back() -> None:
    run = run_from_dict(
        {
            "model": "llama-3.2-1b",
            "cluster": MIXED,
            "strategy": {"kind": "ddp", "shares": shares((8, 5), (8, 2))},
        }
    ).resolved()
    assert (run.strategy.accumulate, run.strategy.micro_batches) == (5, 8 * 5 + 8 * 2)
    assert run_from_dict(tomllib.loads(write_run(run))) == run
    assert run.job.tokens_per_step(run.strategy) == run.job.seq_len * 56
    # Another accumulation is one for all.
    assert run.strategy.but(accumulate=3).shares is None


def test_shares_are_given_by_part() -> None:
    run = describe_run("llama-3.2-1b", MIXED, "zero1", shares="5,2")
    assert run.strategy.shares is not None
    assert [(s.devices, s.accumulate) for s in run.strategy.shares] == [(8, 5), (8, 2)]
    for wrong in ("5", "5,0", "5,2,1", "many,2"):
        with pytest.raises(SpecError, match=r"strategy\.shares"):
            describe_run("llama-3.2-1b", MIXED, "zero1", shares=wrong)


# By strategy on 4 devices, two of each part: whether its collectives allow unequal counts.
CASES: list[tuple[dict[str, Any], bool]] = [
    ({"kind": "ddp"}, True),
    ({"kind": "ddp", "grad_sync": "every"}, False),
    ({"kind": "zero1"}, True),
    ({"kind": "zero2"}, False),
    ({"kind": "zero2", "grad_sync": "last"}, True),
    ({"kind": "zero3"}, False),
    ({"kind": "zero3", "grad_sync": "last"}, False),
    ({"kind": "zero3", "shard": 2}, True),
    ({"kind": "zero3", "shard": 2, "grad_sync": "every"}, False),
    ({"kind": "zero2", "shard": 2}, True),
    ({"kind": "zero1", "tensor": 2}, True),
    ({"kind": "zero1", "tensor": 2, "tensor_across_nodes": True}, False),
    ({"kind": "zero1", "tensor": 4}, False),
]


@pytest.mark.parametrize(("fields", "runs"), CASES, ids=str)
def test_parts_communicate_once_a_step(fields: dict[str, Any], runs: bool) -> None:
    unequal = Strategy.read({**fields, "shares": shares((2, 3), (2, 1))})
    if runs:
        assert unequal.resolve(4, 2).shares == unequal.shares
    else:
        with pytest.raises(SpecError, match=r"strategy\.(shares|grad_sync)"):
            unequal.resolve(4, 2)
    # Equal counts may communicate at any time.
    Strategy.read({**fields, "shares": shares((2, 3), (2, 3))}).resolve(4, 2)


def test_shares_and_global_batch_must_agree() -> None:
    strategy = Strategy.read({"kind": "ddp", "shares": shares((2, 3), (2, 1))}).resolve(4, 2)
    assert Job(seq_len=16, global_batch=16 * 8).split(strategy) == strategy
    with pytest.raises(SpecError, match=r"job\.global_batch"):
        Job(seq_len=16, global_batch=16 * 16).split(strategy)
    with pytest.raises(SpecError, match="accumulate follows from shares"):
        Strategy.read({"kind": "ddp", "accumulate": 4, "shares": shares((2, 3), (2, 1))})
