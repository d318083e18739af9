"""Write a run as JSON of transformers' TrainingArguments. Checked against transformers 5."""

from __future__ import annotations

import json
from typing import Any

from shardwise.spec.families import BLOCKS
from shardwise.spec.job import Optimizer
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import TrainSettings
from shardwise.stacks.read.trainer import read
from shardwise.stacks.write.differences import (
    Comparison,
    Rule,
    compare,
    padded_experts,
    recompute_all_or_none,
)
from shardwise.stacks.write.exported import USUAL, Exported, Target
from shardwise.stacks.write.torchrun import script_command
from shardwise.stacks.write.trackers import trackers_of

NAME = "trainer.json"

_OPTIMIZERS: dict[Optimizer, str] = {"adamw": "adamw_torch", "sgd": "sgd"}
_RULES = (
    Rule(("kind",), "the Trainer runs {kind}: parameters stay gathered in a micro-batch"),
    Rule(
        ("param_dtype", "master_dtype"),
        "TrainingArguments offer fp32, bf16 and fp16 with fp32 master weights; the Trainer "
        "computes in {param_dtype}",
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
        "the Trainer reduces gradients in the last micro-batch only and gathers parameters again "
        "for each",
    ),
    Rule(("prefetch", "forward_prefetch"), "FSDP2 prefetches one unit in the backward"),
    Rule(("blocks_per_unit",), "every block is one FSDP unit"),
    Rule(("ddp_bucket_mib",), "set ddp_bucket_cap_mb to a whole number of MiB"),
    Rule(("recompute",), "the Trainer recomputes every block or none: recompute {recompute}"),
    Rule(
        ("loss", "loss_chunks"),
        "all logits of a micro-batch are in memory at once; on GPUs, use_liger_kernel avoids that "
        "with another fused loss",
    ),
)
_ON_CPUS = Rule(
    ("kind", "shard", "replicate", "offload", "reshard_after_forward", "reduce_dtype"),
    "accelerate, which the Trainer uses, shards on GPUs only; on CPUs it runs DDP",
)
_SCRIPT_RULES = (
    Rule(
        ("shard", "replicate"),
        "pass parallelism_config=ParallelismConfig(dp_replicate_size={replicate}, "
        "dp_shard_size={shard}) of accelerate to TrainingArguments; JSON cannot hold it",
    ),
)


def export(run: RunSpec, target: Target = USUAL) -> Exported:
    """JSON that `HfArgumentParser((TrainingArguments,)).parse_json_file` takes."""
    table = _table(run)
    found = _compared(run, table)
    experts = padded_experts(run, found.applied, "the Trainer")
    unsupported = (*found.unsupported, *experts, *_other_differences(run))
    text = json.dumps(table, indent=2) + "\n"
    command = script_command(run, f"train.py {target.name(NAME)}")
    return Exported(NAME, text, unsupported, command, found.applied, _in_script(run, found))


def applied(run: RunSpec) -> Strategy:
    """The strategy of a run as transformers' Trainer runs it."""
    return _compared(run, _table(run)).applied


def _compared(run: RunSpec, table: dict[str, Any]) -> Comparison:
    strategy = run.strategy
    by_script: dict[str, object] = {}
    if strategy.hybrid and "fsdp" in table:
        by_script = {"shard": strategy.shard, "replicate": strategy.replicate}
    back = dict(read(table).strategy)
    if strategy.kind == "single":
        # Which of the two runs depends on the number of processes, which the launcher decides.
        back["kind"] = "single"
    unsharded = strategy.sharded and "fsdp" not in table
    rules = (_ON_CPUS, *_RULES) if unsharded else _RULES
    return compare(run, back, rules, by_script, _SCRIPT_RULES)


def _table(run: RunSpec) -> dict[str, Any]:
    strategy = run.strategy
    sharded = strategy.sharded and not run.cluster.device.is_cpu
    table: dict[str, Any] = {
        "output_dir": run.train.folder if run.train else "runs",
        "per_device_train_batch_size": strategy.micro_batch,
        "gradient_accumulation_steps": strategy.accumulate,
        **_precision(strategy),
    }
    recomputes = recompute_all_or_none(strategy) == "full"
    if sharded:
        table["fsdp"] = True
        table["fsdp_config"] = _fsdp(run, recomputes)
    elif recomputes:
        table["gradient_checkpointing"] = True
    if strategy.compile:
        table["torch_compile"] = True
    bucket = strategy.ddp_bucket_mib
    if strategy.kind == "ddp" and bucket is not None and bucket == int(bucket):
        table["ddp_bucket_cap_mb"] = int(bucket)
    if run.cluster.device.is_cpu:
        table["use_cpu"] = True
    if run.train is not None:
        table |= _train(run, run.train)
    return table


def _precision(strategy: Strategy) -> dict[str, bool]:
    low = strategy.param_dtype
    return {low: True} if strategy.master_dtype == "fp32" and low in ("bf16", "fp16") else {}


def _fsdp(run: RunSpec, recomputes: bool) -> dict[str, Any]:
    strategy = run.strategy
    table: dict[str, Any] = {
        "version": 2,
        "reshard_after_forward": strategy.reshard_after_forward is not False,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "SHARDED_STATE_DICT",
        "cpu_offload": strategy.offload,
        "activation_checkpointing": recomputes,
        "cpu_ram_efficient_loading": False,
    }
    if isinstance(run.model, ModelSpec):
        table["transformer_layer_cls_to_wrap"] = [BLOCKS[run.model.family].class_name]
    return table


def _train(run: RunSpec, train: TrainSettings) -> dict[str, Any]:
    final = train.final_learning_rate
    cosine: dict[str, Any] = {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": final},
    }
    table = {
        "max_steps": train.steps,
        "warmup_steps": train.warmup_steps,
        "learning_rate": train.learning_rate,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.clip_norm,
        "optim": _OPTIMIZERS.get(run.job.optimizer, "adamw_torch"),
        "adam_beta1": train.beta1,
        "adam_beta2": train.beta2,
        "adam_epsilon": train.epsilon,
        "seed": train.seed,
        "logging_steps": train.log_every,
        "report_to": list(trackers_of(train)) or "none",
        **(cosine if train.schedule == "cosine" else {"lr_scheduler_type": "constant_with_warmup"}),
    }
    save = train.checkpoint
    if not save.save:
        return {**table, "save_strategy": "no"}
    if save.every is not None:
        table |= {"save_strategy": "steps", "save_steps": save.every}
    return {**table, "save_total_limit": save.keep or None}


def _in_script(run: RunSpec, found: Comparison) -> tuple[str, ...]:
    said = [*found.in_script]
    if not run.strategy.sharded and run.strategy.master_dtype == "fp32":
        said.append(
            "master_dtype = fp32: load the model with dtype=torch.float32; transformers 5 loads "
            "the dtype of the checkpoint otherwise."
        )
    said.append(
        f"seq_len = {run.job.seq_len}: truncate or pack sequences to it; TRL's SFTConfig takes "
        "max_length."
    )
    return tuple(said)


def _other_differences(run: RunSpec) -> list[str]:
    """Differences that no field of a strategy expresses."""
    said = []
    train = run.train
    if run.strategy.sharded and isinstance(run.model, ModelSpec) and not run.model.tied:
        said.append(
            "Units: the Trainer makes one unit of the embedding and one of the last norm and the "
            "head; Shardwise puts both in the root unit."
        )
    if run.strategy.kind == "ddp":
        said.append(
            "Gradients: the Trainer's DDP keeps separate buckets, 4 bytes more per parameter."
        )
    if run.job.optimizer not in _OPTIMIZERS:
        said.append(
            f"job.optimizer = {run.job.optimizer}: TrainingArguments have no such optimizer; the "
            "file names adamw_torch, which keeps two states per parameter."
        )
    if train is not None and train.checkpoint.save and train.checkpoint.every is None:
        said.append(
            f"train.checkpoint.minutes = {train.checkpoint.minutes:g}: the Trainer saves every 500 "
            "steps; set save_steps."
        )
    if train is not None:
        said.append("[data]: data and tokenizer are set by your script.")
    return said
