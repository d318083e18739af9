"""The run that checks train: a Llama of a size that suits the device, and its layouts."""

from __future__ import annotations

from typing import Any

from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import TrainSettings

# 5 million parameters: a step of CPUs takes a fraction of a second.
ON_CPU: dict[str, int] = {"layers": 4, "hidden": 256, "heads": 4, "ffn": 704, "vocab": 4096}
# 168 million parameters: large enough for the caching allocator, small enough for 8 GB.
ON_GPU: dict[str, int] = {"layers": 8, "hidden": 1024, "heads": 16, "ffn": 2816, "vocab": 32000}
SEQ_LEN_ON_CPU, SEQ_LEN_ON_GPU = 128, 1024
MICRO_BATCH_ON_CPU, MICRO_BATCH_ON_GPU = 2, 4
# Two of the first steps are measured and not timed.
STEPS = 20

Settings = dict[str, Any]


def model(*, is_cpu: bool) -> ModelSpec:
    """The Llama to train, small on CPUs."""
    seq_len = SEQ_LEN_ON_CPU if is_cpu else SEQ_LEN_ON_GPU
    sizes = ON_CPU if is_cpu else ON_GPU
    fields = {"name": "accept", "family": "llama", "max_positions": seq_len, **sizes}
    return ModelSpec.read(fields)


def layouts(processes: int) -> dict[str, Settings]:
    """The strategy settings to train with on so many processes, by name of the layout."""
    if processes == 1:
        return {"single": {"kind": "single"}}
    found: dict[str, Settings] = {kind: {"kind": kind} for kind in ("ddp", "zero2", "zero3")}
    found["zero1"] = {"kind": "zero1", "accumulate": 2}
    if processes % 2 == 0:
        found["tensor"] = {"kind": "zero3", "tensor": 2}
    if processes % 2 == 0 and processes > 2:
        found["hybrid"] = {"kind": "zero3", "shard": 2}
    return found


def sharded(processes: int) -> Settings:
    """Strategy settings that shard parameters over all devices, for checks of one layout."""
    return {"kind": "single" if processes == 1 else "zero3"}


def describe(
    cluster: ClusterSpec, settings: Settings, steps: int = STEPS, **train: object
) -> RunSpec:
    """A run of the workload on `cluster`, without trackers, checkpoints or restarts.

    `settings` are those of [strategy]; `train` overrides settings of [train].
    """
    is_cpu = cluster.device.is_cpu
    dtype = "fp32" if is_cpu else "bf16"
    size = MICRO_BATCH_ON_CPU if is_cpu else MICRO_BATCH_ON_GPU
    strategy = {"micro_batch": size, "param_dtype": dtype, **settings}
    usual = {"trackers": (), "log_every": steps, "checkpoint": False, "restart": {"attempts": 0}}
    return RunSpec(
        model=model(is_cpu=is_cpu),
        cluster=cluster,
        job=Job(seq_len=SEQ_LEN_ON_CPU if is_cpu else SEQ_LEN_ON_GPU),
        strategy=Strategy.read(strategy, where="strategy"),
        train=TrainSettings.read({"steps": steps, **usual, **train}, where="train"),
    )
