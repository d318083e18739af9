"""Write a run as a DeepSpeed JSON. Checked against DeepSpeed 0.19."""

from __future__ import annotations

import json
from typing import Any

from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.deepspeed.recipe import OPTIMIZERS
from shardwise.stacks.deepspeed.table import INSIDE_ARGUMENTS, WRITTEN
from shardwise.stacks.deepspeed.zero import stage_of
from shardwise.stacks.outcomes import Difference, Differences
from shardwise.stacks.read.deepspeed import read
from shardwise.stacks.table import write_rows
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
    Rule(
        ("expert",),
        "AutoEP divides experts of Mixtral and Qwen3-MoE, in stage 3 without groups and Ulysses",
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
    table = write_rows(WRITTEN, run)
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
    return _comparison(run, write_rows(WRITTEN, run)).applied


def _comparison(run: RunSpec, table: dict[str, Any]) -> Comparison:
    """The strategy as DeepSpeed runs it with this JSON, and how it differs from the run's."""
    stage = table["zero_optimization"]["stage"]
    hybrid = Rule(("shard", "replicate"), _HYBRID + (_HPZ if stage == 3 else ""))
    by_script: dict[str, object] = {
        "recompute": recompute_all_or_none(run.strategy),
        "compile": run.strategy.compile,
    }
    return compare(run, read(table).strategy, (hybrid, *_RULES), by_script, _SCRIPT_RULES)


def config_for_trainer(run: RunSpec) -> dict[str, Any]:
    """The DeepSpeed configuration to pass as `deepspeed` of TrainingArguments.

    Values that TrainingArguments have too are "auto".
    """
    automatic = ("train_batch_size", "train_micro_batch_size_per_gpu",
                 "gradient_accumulation_steps", "gradient_clipping")  # fmt: skip
    return {**write_rows(INSIDE_ARGUMENTS, run), **dict.fromkeys(automatic, "auto")}


def _axes_in_script(strategy: Strategy) -> list[Difference]:
    """What the user's script must do for context parallelism; empty without it."""
    if strategy.context == 1:
        return []
    ulysses = (
        "call UlyssesSPAttentionHF.register_with_transformers before the model is built, pass its "
        "groups as mpu to deepspeed.initialize, and read data through UlyssesSPDataLoaderAdapter"
    )
    return [Difference(ulysses, about="Context parallelism")]


def _block_parameters(run: RunSpec) -> int:
    """The number of parameters of the largest block."""
    from shardwise.units.load import load_units

    units = load_units(run.model, run.job.seq_len, run.strategy.but(blocks_per_unit=1, expert=1))
    return max(unit.numel for unit in units.blocks)


def _other_differences(run: RunSpec) -> list[Difference]:
    """Differences that are not about a field of the strategy."""
    stage, train = stage_of(run), run.train
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
