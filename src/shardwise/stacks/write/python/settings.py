"""The constants at the top of a script: settings of a run that are numbers, names or folders."""

from __future__ import annotations

import re
from collections.abc import Mapping

from shardwise.spec.run import RunSpec
from shardwise.spec.train import DataSettings, TrainSettings
from shardwise.stacks.write.python.constants import Code

OUTPUT = "trained"
# Optimizers of torch that the script supports.
OPTIMIZERS = ("adamw", "adam", "momentum", "sgd")
# Constants by the title of their group.
Constants = Mapping[str, Mapping[str, object]]


def constants_of(
    run: RunSpec, model: Mapping[str, object], data: Mapping[str, object]
) -> Constants:
    """All constants of a run, with `model` and `data`, by the title of their group.

    A script contains only those that it uses.
    """
    return {
        f"The model: {plain_name(run)}.": model,
        _step_title(run): _step(run),
        "The data.": data,
        "The parallel plan.": _plan(run),
        "The optimizer.": _optimizer(run),
        "The run.": _loop_constants(run),
    }


def plain_name(run: RunSpec) -> str:
    """The model's name without characters that could end a comment or docstring."""
    return " ".join(re.sub(r"[^\w .:/+-]", " ", run.model.name).split())[:60] or "a model"


def train_of(run: RunSpec) -> TrainSettings:
    """The section `[train]` of a run, with defaults if it has none."""
    return run.train or TrainSettings()


def data_of(run: RunSpec) -> DataSettings:
    """The section `[data]` of a run, with defaults if it has none."""
    return run.data or DataSettings()


def on_cpu(run: RunSpec) -> bool:
    """Whether the run uses CPUs: `train.device` is "cpu", or "auto" with a CPU cluster.

    A CPU cluster means CPUs even on a machine with a GPU.
    """
    kind = train_of(run).device
    return kind == "cpu" or (kind == "auto" and run.cluster.device.is_cpu)


def is_fused(run: RunSpec) -> bool:
    """Whether the optimizer is fused, so that a flag on the device can cancel its update.

    torch 2.13 has no fused SGD for sharded parameters.
    """
    return not (run.strategy.sharded and run.job.optimizer in ("sgd", "momentum"))


def _step_title(run: RunSpec) -> str:
    """The title of the constants of a step, with its tokens over all processes."""
    tokens = run.job.tokens_per_step(run.strategy)
    processes = run.strategy.devices
    return f"A step: {tokens:,} tokens on {processes} process{'es' if processes > 1 else ''}."


def _step(run: RunSpec) -> dict[str, object]:
    """Constants of the batch: sequence length, micro-batch and accumulation."""
    return {
        "SEQ_LEN": run.job.seq_len,
        "MICRO_BATCH": run.strategy.micro_batch,
        "ACCUMULATE": run.strategy.accumulate,
    }


def _plan(run: RunSpec) -> dict[str, object]:
    """Constants of the parallel plan."""
    strategy = run.strategy
    return {
        "DEVICE": "cpu" if on_cpu(run) else "cuda",
        "REPLICATE": strategy.mesh.replicate,
        "SHARD": strategy.shard,
        "CONTEXT": strategy.context,
        "TENSOR": strategy.tensor,
        "BLOCKS_PER_UNIT": strategy.blocks_per_unit,
        "RESHARD_AFTER_FORWARD": strategy.reshard_after_forward,
        "BACKWARD_PREFETCH": strategy.prefetch,
        "FORWARD_PREFETCH": strategy.forward_prefetch,
        "BUCKET_MIB": strategy.ddp_bucket_mib,
        "POWERSGD_RANK": strategy.powersgd_rank,
        "POWERSGD_START": strategy.powersgd_start,
        "RECOMPUTE_SHARE": strategy.full_recompute_share,
        "LOSS_CHUNKS": strategy.loss_chunks,
    }


def _optimizer(run: RunSpec) -> dict[str, object]:
    """Constants of the optimizer and its schedule."""
    train = train_of(run)
    return {
        "LEARNING_RATE": train.learning_rate,
        "WARMUP_STEPS": train.warmup_steps,
        "FINAL_SHARE": train.final_learning_rate,
        "BETAS": (train.beta1, train.beta2),
        "EPSILON": train.epsilon,
        "MOMENTUM": train.momentum if run.job.optimizer == "momentum" else 0.0,
        "WEIGHT_DECAY": train.weight_decay,
        "CLIP_NORM": train.clip_norm,
    }


def _loop_constants(run: RunSpec) -> dict[str, object]:
    """Constants of the loop, the logs and the checkpoints."""
    train = train_of(run)
    return {
        "STEPS": train.steps,
        "SEED": train.seed,
        "LOG_EVERY": train.log_every,
        "SAVE_EVERY": train.checkpoint.every or 0,
        "THREADS": train.threads or 0,
        "OUTPUT": Code(f'Path("{OUTPUT}")'),
    }
