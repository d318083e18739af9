"""Write a run as a DeepSpeed JSON. Checked against DeepSpeed 0.19."""

from __future__ import annotations

import json
from typing import Any

from shardwise.spec.model import ModelSpec
from shardwise.spec.optimizer import Optimizer
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import TrainSettings
from shardwise.stacks.outcomes import Difference, Differences
from shardwise.stacks.read.deepspeed import AUTOCAST, KINDS, OPTIMIZERS, read
from shardwise.stacks.write.differences import (
    WHOLE_ACTIVATIONS,
    Comparison,
    Rule,
    compare,
    recompute_all_or_none,
)
from shardwise.stacks.write.exported import DEFAULT_TARGET, Exported, Target

NAME = "deepspeed.json"

_HYBRID = (
    "DeepSpeed shards over all {shard} devices; it has no groups since MiCS, its hybrid sharding, "
    "was removed"
)
_HPZ = (
    ". zero_hpz_partition_size keeps a second copy of the parameters in each group, so that only "
    "forward gathers and reductions cross groups"
)
_RULES = (
    Rule(("kind",), "as parameters stay gathered, DeepSpeed runs {kind}"),
    Rule(
        ("param_dtype", "master_dtype"),
        "DeepSpeed computes in fp32, bf16 or fp16 with fp32 master weights; it uses {param_dtype}",
    ),
    Rule(("reduce_dtype",), "DeepSpeed reduces gradients in {reduce_dtype}"),
    Rule(
        ("reshard_after_forward",),
        "the backward gathers parameters from groups of {reshard_after_forward}",
    ),
    Rule(
        ("grad_sync",),
        "the stage decides: 0 and 1 reduce in the last micro-batch, 2 and 3 in every one",
    ),
    Rule(
        ("reshard_after_backward",),
        "stage 3 frees parameters after each backward, the other stages never",
    ),
    Rule(
        ("prefetch", "forward_prefetch"),
        "DeepSpeed counts elements, not units: stage3_prefetch_bucket_size, in both directions",
    ),
    Rule(("blocks_per_unit",), "DeepSpeed has no units: it gathers module by module"),
    WHOLE_ACTIVATIONS._replace(
        why="AutoTP divides matrices only; what lies between them is whole on every device "
        "of a tensor group"
    ),
    Rule(("context_method",), "DeepSpeed divides sequences by Ulysses: an all-to-all of heads"),
    Rule(
        ("recompute",),
        "model.gradient_checkpointing_enable() recomputes every block: recompute {recompute}",
    ),
    Rule(
        ("offload",),
        "below stage 3 only the optimizer can be offloaded, and activations stay on the device "
        "unless deepspeed.checkpointing keeps them on the CPU; it runs offload {offload}",
    ),
    Rule(
        ("ddp_bucket_mib",),
        "DeepSpeed all-reduces after the backward, in buckets of its own",
    ),
)
_SCRIPT_RULES = (
    Rule(("recompute",), "call model.gradient_checkpointing_enable()"),
    Rule(("compile",), "call engine.compile()"),
)


def export(run: RunSpec, target: Target = DEFAULT_TARGET) -> Exported:
    """The run as JSON for `deepspeed --deepspeed_config`."""
    table = _table(run)
    if table["zero_optimization"]["stage"] == 3 and isinstance(run.model, ModelSpec):
        size = run.strategy.prefetch * _block_parameters(run)
        table["zero_optimization"]["stage3_prefetch_bucket_size"] = size
    found = _comparison(run, table)
    differences = (*found.differences, *_other_differences(run))
    text = json.dumps(table, indent=2) + "\n"
    command = _command(run, target.name(NAME))
    by_script = (*found.by_script, *_axes_in_script(run.strategy))
    return Exported(NAME, text, differences, command, found.applied, by_script)


def applied(run: RunSpec) -> Strategy:
    """The strategy of a run as DeepSpeed runs it."""
    return _comparison(run, _table(run)).applied


def _comparison(run: RunSpec, table: dict[str, Any]) -> Comparison:
    """The strategy as DeepSpeed runs it with this JSON, and how it differs from the run's."""
    stage = table["zero_optimization"]["stage"]
    hybrid = Rule(("shard", "replicate"), _HYBRID + (_HPZ if stage == 3 else ""))
    by_script: dict[str, object] = {
        "recompute": recompute_all_or_none(run.strategy),
        "compile": run.strategy.compile,
    }
    return compare(run, read(table).strategy, (hybrid, *_RULES), by_script, _SCRIPT_RULES)


def _stage(run: RunSpec) -> int:
    """The ZeRO stage, 0 to 3; ZeRO-3 that keeps parameters gathered is stage 2."""
    strategy = run.strategy
    if not strategy.sharded:
        return 0
    if strategy.kind == "zero3" and strategy.reshard_after_forward is False:
        return 2
    return KINDS.index(strategy.kind)


def _table(run: RunSpec) -> dict[str, Any]:
    """The keys and values of the JSON."""
    strategy = run.strategy
    samples = strategy.micro_batch * strategy.accumulate * strategy.data_parallel
    table: dict[str, Any] = {
        "train_batch_size": samples,
        "train_micro_batch_size_per_gpu": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.accumulate,
        "zero_optimization": _zero(run),
        **_precision(run),
        **_tensor(strategy),
    }
    if strategy.context > 1:
        table["sequence_parallel_size"] = strategy.context
    if run.train is not None:
        table["gradient_clipping"] = run.train.clip_norm
        table["optimizer"] = _optimizer(run.job.optimizer, run.train)
        table["scheduler"] = _scheduler(run.train)
        table["steps_per_print"] = run.train.log_every
        # Without it DeepSpeed refuses to shard optimizers that it has not tested.
        if run.job.optimizer in ("sgd", "momentum"):
            table["zero_allow_untested_optimizer"] = True
    return table


def config_for_trainer(run: RunSpec) -> dict[str, Any]:
    """The DeepSpeed configuration to pass as `deepspeed` of TrainingArguments.

    Values that TrainingArguments have too are "auto".
    """
    automatic = ("train_batch_size", "train_micro_batch_size_per_gpu",
                 "gradient_accumulation_steps", "gradient_clipping")  # fmt: skip
    return {
        "zero_optimization": _zero(run),
        **_precision(run),
        **_tensor(run.strategy),
        **dict.fromkeys(automatic, "auto"),
    }


def _tensor(strategy: Strategy) -> dict[str, Any]:
    """The keys of tensor parallelism; empty without it."""
    # https://www.deepspeed.ai/tutorials/autotp-training
    return {"tensor_parallel": {"autotp_size": strategy.tensor}} if strategy.tensor > 1 else {}


def _axes_in_script(strategy: Strategy) -> list[Difference]:
    """What the user's script must do for context parallelism; empty without it."""
    if strategy.context == 1:
        return []
    ulysses = (
        "call UlyssesSPAttentionHF.register_with_transformers before the model is built, pass its "
        "groups as mpu to deepspeed.initialize, and read data through UlyssesSPDataLoaderAdapter"
    )
    return [Difference(ulysses, about="Context parallelism")]


def _zero(run: RunSpec) -> dict[str, Any]:
    """The section `zero_optimization`."""
    strategy, stage = run.strategy, _stage(run)
    table: dict[str, Any] = {"stage": stage}
    if stage:
        table |= {"overlap_comm": True, "contiguous_gradients": True, "reduce_scatter": True}
    if stage == 3:
        group = strategy.reshard_after_forward
        if strategy.hybrid:
            table["zero_hpz_partition_size"] = strategy.shard
        elif isinstance(group, int) and not isinstance(group, bool):
            table["zero_hpz_partition_size"] = group
    moves = strategy.offloads("parameters")
    if moves or (strategy.offloads("optimizer") and stage):
        table["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
        if moves and stage == 3:
            table["offload_param"] = {"device": "cpu", "pin_memory": True}
    return table


def _block_parameters(run: RunSpec) -> int:
    """The number of parameters of the largest block."""
    from shardwise.units.load import load_units

    units = load_units(run.model, run.job.seq_len, run.strategy.but(blocks_per_unit=1))
    return max(unit.numel for unit in units.blocks)


def _precision(run: RunSpec) -> dict[str, Any]:
    """The keys about dtypes."""
    strategy = run.strategy
    low = strategy.param_dtype
    if low == strategy.master_dtype == "bf16" and strategy.sharded:
        kept = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
        reduce = strategy.reduce_dtype
        return {"bf16": {"enabled": True, **kept}, "communication_data_type": reduce}
    if low not in AUTOCAST or strategy.master_dtype != "fp32":
        return {}
    if not strategy.sharded:
        # Parameters stay in fp32, as Shardwise keeps them under DDP.
        return {"torch_autocast": {"enabled": True, "dtype": AUTOCAST[low]}}
    return {
        low: {"enabled": True},
        "communication_data_type": strategy.reduce_dtype,
        "data_types": {"grad_accum_dtype": "fp32"},
    }


def _optimizer(kind: Optimizer, train: TrainSettings) -> dict[str, Any]:
    """The section `optimizer`; AdamW if DeepSpeed does not have the optimizer."""
    name, more = OPTIMIZERS.get(kind, OPTIMIZERS["adamw"])
    settings: dict[str, object] = {"lr": train.learning_rate, "weight_decay": train.weight_decay}
    if kind in ("sgd", "momentum"):
        settings["momentum"] = train.momentum if kind == "momentum" else 0.0
    else:
        settings["betas"] = [train.beta1, train.beta2]
    if kind not in ("sgd", "momentum", "lion"):
        settings["eps"] = train.epsilon
    return {"type": name, "params": {**settings, **more}}


def _scheduler(train: TrainSettings) -> dict[str, Any]:
    """The section `scheduler`."""
    warmup: dict[str, object] = {
        # DeepSpeed warms up over 2 steps at least.
        "warmup_num_steps": max(1, train.warmup_steps),
        "warmup_type": "linear",
    }
    if train.schedule == "constant":
        rates = {"warmup_min_lr": 0.0, "warmup_max_lr": train.learning_rate}
        return {"type": "WarmupLR", "params": {**rates, **warmup}}
    if train.schedule == "linear":
        rates = {"warmup_min_lr": 0.0, "warmup_max_lr": train.learning_rate}
        decay = {"total_num_steps": train.steps, **rates, **warmup}
        return {"type": "WarmupDecayLR", "params": decay}
    settings = {"total_num_steps": train.steps, "cos_min_ratio": train.final_learning_rate}
    return {"type": "WarmupCosineLR", "params": {**settings, "warmup_min_ratio": 0.0, **warmup}}


def _other_differences(run: RunSpec) -> list[Difference]:
    """Differences that are not about a field of the strategy."""
    stage, train = _stage(run), run.train
    differences = Differences()
    if stage in (1, 2):
        differences.add(
            "DeepSpeed keeps all of them on every device between steps and gathers them after the "
            "optimizer step instead of in the forward",
            about="Parameters",
        )
    if stage == 3:
        differences.add(
            "stage 3 gathers module by module; it keeps up to 1e9 parameters gathered "
            "(stage3_max_live_parameters) and does not shard tensors below 1e5 elements "
            "(stage3_param_persistence_threshold)",
            about="Units",
        )
    if run.strategy.tensor > 1:
        differences.add(
            "AutoTP leaves embedding, head and logits whole on every device of a tensor group; "
            "Shardwise divides them by vocabulary",
            about="Loss",
        )
    if run.job.optimizer not in OPTIMIZERS:
        differences.add(
            "DeepSpeed has no such optimizer; the file names AdamW, which keeps two states per "
            "parameter",
            {"job.optimizer": run.job.optimizer},
        )
    if train is not None:
        differences.add(
            "DeepSpeed's warm-up starts from 0, one step later, and takes at least 2 steps",
            about="Learning rate",
        )
        if train.schedule == "linear" and train.final_learning_rate:
            differences.add(
                "DeepSpeed decays the learning rate to 0",
                {"train.final_learning_rate": train.final_learning_rate},
            )
        if train.weight_decay:
            differences.add(
                "it applies to norms and biases too, unless your script passes parameter groups",
                about="weight_decay",
            )
        differences.add("steps, seed, checkpoints and data are set by your script", about="[train]")
    return differences


def _command(run: RunSpec, name: str) -> str:
    """The shell command that starts the run; `name` is the JSON."""
    nodes, processes = run.cluster.nodes, run.cluster.devices_per_node
    where = f"--num_gpus {processes}"
    if nodes > 1:
        where = f"--hostfile hostfile --num_nodes {nodes} --num_gpus {processes}"
    return f"deepspeed {where} train.py --deepspeed --deepspeed_config {name}"
