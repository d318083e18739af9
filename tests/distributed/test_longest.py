"""The longest sequence that a plan answers with, held against real processes.

Tensors of a step at that length stay within the limit; with 10 % more tokens they do not.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.planning.make import make_plan
from shardwise.planning.problem import Problem
from shardwise.planning.reasons.warnings import LongestSequence
from shardwise.predict.estimate import usable_bytes
from shardwise.spec.calibration import Calibration
from shardwise.spec.cluster import ClusterSpec, DeviceSpec
from shardwise.spec.job import Job
from shardwise.spec.strategy import Strategy
from tests.distributed.workers import Workers
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.engine_run import run_case

MODEL = reduced(
    "llama", layers=2, hidden=64, heads=8, kv_heads=4, head_dim=8, ffn=176, vocab=1024,
    max_positions=2**20,
)  # fmt: skip
# What a process holds beside tensors is taken off.
LIMIT, OUTSIDE = 10 * 2**20, 2**32


def cluster() -> ClusterSpec:
    """Four processes with so much memory; rates that any plan can do with."""
    rates = Calibration(
        matmul_efficiency=0.5, matmul_half_s=1e-4, attention_efficiency=0.3, elementwise_factor=1.0,
        launch_s=1e-5, link_efficiency=1.0, network_efficiency=1.0, hop_latency_s=1e-4,
        network_latency_s=1e-4, contention=0.2, optimizer_factor=1.0,
    )  # fmt: skip
    device = DeviceSpec(
        name="CPU", memory=OUTSIDE, memory_bandwidth=1e10, link_bandwidth=1e9, node_size=4,
        peak={"fp32": 1e11},
    )  # fmt: skip
    beside = OUTSIDE - usable_bytes(device)
    device = device.but(memory=LIMIT + beside)
    assert abs(usable_bytes(device) - LIMIT) <= 1
    return ClusterSpec(device=device, devices_per_node=4, calibration=rates)


def peak_bytes(workers: Workers, strategy: Strategy, seq_len: int) -> int:
    case: dict[str, Any] = {
        "model": MODEL.model_dump(mode="json"),
        "strategy": strategy.model_dump(mode="json"),
        "seq_len": seq_len,
        "enough_bytes": LIMIT,
    }
    [ranks] = workers.run(run_case, strategy.devices, [case])
    return int(ranks[0]["peak_bytes"])


def test_the_longest_sequence_fits_and_a_longer_one_does_not(workers: Workers) -> None:
    base = Strategy(kind="zero3", param_dtype="fp32")
    problem = Problem(MODEL, cluster(), Job(seq_len=512), base)
    plan = make_plan(problem, objective="sequence")
    assert isinstance(plan.aim, LongestSequence)
    assert plan.winner is not None
    strategy, longest = plan.winner.strategy, plan.aim.tokens
    assert plan.aim.limited_by == "memory"
    # All four processes share each sequence.
    assert strategy.mesh.inner == 4
    assert longest >= 4096
    assert peak_bytes(workers, strategy, longest) <= LIMIT
    longer = -(-round(1.1 * longest) // 16) * 16
    assert peak_bytes(workers, strategy, longer) > LIMIT
