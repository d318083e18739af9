"""A run as transformers' TrainingArguments, which the Trainer, TRL and LLaMA-Factory accept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.spec.families import BLOCKS
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import TrainSettings
from shardwise.stacks.outcomes import Difference, Differences
from shardwise.stacks.table import write_rows
from shardwise.stacks.training_arguments import BATCH, METHODS, OPTIMIZERS, SCHEDULE, TRAIN
from shardwise.stacks.write.accelerate import GATHERED_LOGITS
from shardwise.stacks.write.deepspeed import config_for_trainer
from shardwise.stacks.write.differences import (
    RING,
    WHOLE_ACTIVATIONS,
    Rule,
    recompute_all_or_none,
)
from shardwise.stacks.write.trackers import trackers_of

# The Trainer's name in sentences.
TRAINER = "the Trainer"
RULES = (
    Rule(("kind",), "{who} runs {kind}: parameters stay gathered in a micro-batch"),
    Rule(
        ("param_dtype", "master_dtype"),
        "TrainingArguments offer fp32, bf16 and fp16 with fp32 master weights; {who} computes in "
        "{param_dtype}",
    ),
    Rule(
        ("reduce_dtype",),
        "bf16 and fp16 also set the dtype of reductions: gradients are reduced in {reduce_dtype}",
    ),
    Rule(
        ("reshard_after_forward",),
        "fsdp_config.reshard_after_forward is true or false; the backward gathers from the whole "
        "shard group",
    ),
    Rule(
        ("grad_sync", "reshard_after_backward"),
        "{who} reduces gradients in the last micro-batch only and gathers parameters again for "
        "each",
    ),
    Rule(("prefetch", "forward_prefetch"), "FSDP2 prefetches one unit in the backward"),
    Rule(("blocks_per_unit",), "every block is one FSDP unit"),
    WHOLE_ACTIVATIONS,
    RING,
    Rule(("ddp_bucket_mib",), "set ddp_bucket_cap_mb to a whole number of MiB"),
    Rule(("recompute",), "{who} recomputes every block or none: recompute {recompute}"),
    Rule(
        ("loss", "loss_chunks", "loss_kernel"),
        "all logits of a micro-batch are in memory at once; on GPUs, use_liger_kernel avoids that "
        "with another fused loss",
    ),
)
ON_CPUS = Rule(
    ("kind", "shard", "replicate", "offload", "reshard_after_forward", "reduce_dtype"),
    "accelerate, which {who} uses, shards on GPUs only; on CPUs it runs DDP",
)


def rules_of(run: RunSpec, sharded: bool) -> tuple[Rule, ...]:
    """The reasons for changed fields; `sharded` is whether the stack's file shards the model."""
    return (ON_CPUS, *RULES) if run.strategy.sharded and not sharded else RULES


def arguments(run: RunSpec, with_deepspeed: bool = False) -> dict[str, Any]:
    """The keys and values of TrainingArguments for a run.

    `with_deepspeed` runs ZeRO-1, which FSDP2 does not have, through DeepSpeed.
    """
    strategy = run.strategy
    sharded = strategy.sharded and not run.cluster.device.is_cpu
    table: dict[str, Any] = {
        "output_dir": run.train.folder if run.train else "runs",
        **write_rows(BATCH, run),
        **_precision(strategy),
    }
    recomputes = recompute_all_or_none(strategy) == "full"
    by_deepspeed = sharded and with_deepspeed and strategy.kind == "zero1"
    if by_deepspeed:
        table["deepspeed"] = config_for_trainer(run)
    elif sharded:
        table["fsdp"] = True
        table["fsdp_config"] = _fsdp(run, recomputes)
    if recomputes and (by_deepspeed or not sharded):
        table["gradient_checkpointing"] = True
    table |= write_rows(METHODS, run)
    if run.cluster.device.is_cpu:
        table["use_cpu"] = True
    if run.train is not None:
        table |= _train(run, run.train)
    return table


def by_parallelism_config(strategy: Strategy) -> dict[str, object]:
    """The fields of a strategy that accelerate's ParallelismConfig sets, with their values."""
    found: dict[str, object] = {"shard": strategy.shard, "replicate": strategy.replicate}
    if strategy.tensor > 1:
        found |= {"tensor": strategy.tensor, "sequence_parallel": False}
    if strategy.context > 1:
        found |= {"context": strategy.context, "context_method": "ring"}
    return found


def _precision(strategy: Strategy) -> dict[str, bool]:
    """`bf16` or `fp16` set to True for mixed precision; empty otherwise."""
    low = strategy.param_dtype
    return {low: True} if strategy.master_dtype == "fp32" and low in ("bf16", "fp16") else {}


def _fsdp(run: RunSpec, recomputes: bool) -> dict[str, Any]:
    """The section `fsdp_config`."""
    strategy = run.strategy
    table: dict[str, Any] = {
        "version": 2,
        "reshard_after_forward": strategy.reshard_after_forward is not False,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_offload": strategy.offloads("parameters"),
        "activation_checkpointing": recomputes,
        "cpu_ram_efficient_loading": False,
    }
    if isinstance(run.model, ModelSpec):
        table["transformer_layer_cls_to_wrap"] = [BLOCKS[run.model.family].class_name]
    return table


def _train(run: RunSpec, train: TrainSettings) -> dict[str, Any]:
    """The keys for `[train]`: optimizer, schedule, trackers and checkpoints."""
    table = {
        **write_rows(TRAIN, run),
        "report_to": list(trackers_of(train)) or "none",
        **SCHEDULE.written(run),
    }
    save = train.checkpoint
    if not save.save:
        return {**table, "save_strategy": "no"}
    if save.every is not None:
        table |= {"save_strategy": "steps", "save_steps": save.every}
    return {**table, "save_total_limit": save.keep or None}


def other_differences(
    run: RunSpec,
    who: str = TRAINER,
    optimizers: Mapping[str, str] = OPTIMIZERS,
    with_deepspeed: bool = False,
) -> list[Difference]:
    """Differences that are not about a field of the strategy.

    Args:
        run: The run.
        who: The stack, as sentences name it.
        optimizers: The optimizers that the stack has.
        with_deepspeed: Whether the stack runs ZeRO-1 through DeepSpeed.
    """
    differences = Differences()
    train = run.train
    fsdp = run.strategy.sharded and not (run.strategy.kind == "zero1" and with_deepspeed)
    if fsdp and isinstance(run.model, ModelSpec) and not run.model.tied:
        differences.add(
            f"{who} makes one unit of the embedding and one of the last norm and the head; "
            "Shardwise puts both in the root unit",
            about="Units",
        )
    if run.strategy.tensor > 1:
        differences.add(GATHERED_LOGITS, about="Loss")
    if run.strategy.kind == "ddp":
        separate = f"{who}'s DDP keeps separate buckets, 4 bytes more per parameter"
        differences.add(separate, about="Gradients")
    if run.job.optimizer not in optimizers:
        # A sentence begins with a capital letter.
        owner = "TrainingArguments have" if who == TRAINER else f"{who[0].upper()}{who[1:]} has"
        differences.add(
            f"{owner} no such optimizer; the file names adamw_torch, which keeps two states per "
            "parameter",
            {"job.optimizer": run.job.optimizer},
        )
    if train is not None and train.checkpoint.save and train.checkpoint.every is None:
        differences.add(
            f"{who} saves every 500 steps; set save_steps",
            {"train.checkpoint.minutes": train.checkpoint.minutes},
        )
    return differences
