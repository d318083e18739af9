"""A cluster whose coefficients are known, and what runs on it would take."""

from __future__ import annotations

from shardwise.observe.observation import Observation, units_of
from shardwise.spec.job import Job
from shardwise.spec.lookup import find_cluster, find_model
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.trials.calibrate.fit import CPU

TRUTH = CPU._replace(
    matmul_efficiency=0.05, link_efficiency=0.02, hop_latency_s=8e-4, contention=0.5,
    optimizer_factor=25.0, overhead_s=0.02, network_efficiency=0.92,
    exchange_latency_s=8e-3,
)  # fmt: skip


SHAPES = {
    "hsdp": {"kind": "zero3", "shard": 2, "replicate": 2},
    "tensor inside": {"kind": "zero3", "tensor": 2},
    "tensor across": {"kind": "zero3", "tensor": 2, "tensor_across_nodes": True},
}


def run_of(kind: str, batch: int, network: str = "1Gbps", model: str = "gpt2") -> RunSpec:
    cluster = find_cluster(f"2x2xCPU@{network}")
    shape = SHAPES.get(kind, {"kind": kind})
    strategy = Strategy.read({**shape, "micro_batch": batch, "param_dtype": "fp32"})
    run = RunSpec(model=find_model(model), cluster=cluster, job=Job(seq_len=128), strategy=strategy)
    return run.resolved()


def observed(kind: str, batch: int, network: str = "1Gbps", model: str = "gpt2") -> Observation:
    """What a cluster with these coefficients would take."""
    run = run_of(kind, batch, network, model)
    blank = Observation(run, units_of(run), 1.0, None, None)
    parts = blank.predict(TRUTH, run.cluster)
    return blank._replace(step_s=parts.step_s, compute_s=parts.compute_s, exposed_s=parts.exposed_s)
