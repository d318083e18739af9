"""Write a run as the YAML of `accelerate config`. Checked against accelerate 1.15."""

from __future__ import annotations

from typing import Any

from shardwise.spec.families import BLOCKS
from shardwise.spec.lookup import ModuleRef
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.outcomes import Difference, Differences
from shardwise.stacks.read.accelerate import CONTEXT, REPLICATE, SHARD, TENSOR, read
from shardwise.stacks.write.differences import (
    COMPRESSION,
    RING,
    WHOLE_ACTIVATIONS,
    Comparison,
    Rule,
    compare,
    padded_experts,
    recompute_all_or_none,
)
from shardwise.stacks.write.exported import DEFAULT_TARGET, Exported, Target

NAME = "accelerate.yaml"

_RULES = (
    Rule(
        ("kind",), "accelerate runs {kind}: parameters stay gathered between forward and backward"
    ),
    Rule(
        ("param_dtype", "master_dtype"),
        "mixed_precision offers fp32, bf16 and fp16 with fp32 master weights; accelerate computes "
        "in {param_dtype}. For other master weights, load the model in that dtype",
    ),
    Rule(
        ("reduce_dtype",),
        "mixed_precision also sets the dtype of reductions, so gradients are reduced in "
        "{reduce_dtype}. To change it, pass mixed_precision_policy to a "
        "FullyShardedDataParallelPlugin in your script",
    ),
    Rule(
        ("reshard_after_forward",),
        "fsdp_reshard_after_forward is true or false; the backward gathers from the whole shard "
        "group",
    ),
    Rule(
        ("grad_sync", "reshard_after_backward"),
        "Accelerator.accumulate reduces gradients in the last micro-batch only and gathers "
        "parameters again for each; GradientAccumulationPlugin(sync_each_batch=True) reduces in "
        "every micro-batch",
    ),
    Rule(("prefetch", "forward_prefetch"), "FSDP2 prefetches one unit in the backward"),
    Rule(("blocks_per_unit",), "every block is one FSDP unit"),
    WHOLE_ACTIVATIONS,
    RING,
    Rule(("ddp_bucket_mib",), "DDP uses 25 MiB; change it with DistributedDataParallelKwargs"),
    Rule(
        ("recompute",),
        "accelerate recomputes every block or none: activation checkpointing {recompute}",
    ),
)
GATHERED_LOGITS = (
    "the plan of transformers gathers the logits of all tokens on every device of a tensor group; "
    "Shardwise leaves them divided by vocabulary"
)
_ON_CPUS = Rule(
    ("kind", "shard", "replicate", "offload", "recompute", "reshard_after_forward", "reduce_dtype"),
    "accelerate shards on GPUs only; on CPUs it runs DDP",
)
_SCRIPT_RULES = (
    Rule(("micro_batch",), "pass it as batch_size to your DataLoader"),
    Rule(
        ("accumulate",),
        "the command below sets it; Accelerator(gradient_accumulation_steps=...) must not set "
        "another",
    ),
    Rule(("recompute",), "call model.gradient_checkpointing_enable()"),
    COMPRESSION._replace(
        why="pass DistributedDataParallelKwargs to the Accelerator, with comm_hook bf16, fp16 or "
        "power_sgd, and for the latter comm_state_option with matrix_approximation_rank = "
        "{powersgd_rank} and start_powerSGD_iter = {powersgd_start}"
    ),
)


def export(run: RunSpec, target: Target = DEFAULT_TARGET) -> Exported:
    """The run as YAML for `accelerate launch --config_file`."""
    import yaml

    table = _table(run)
    found = _comparison(run, table)
    experts = padded_experts(run, found.applied, "accelerate")
    differences = (*found.differences, *experts, *_other_differences(run, table))
    text = yaml.safe_dump(table, sort_keys=False)
    command = _command(run, target.name(NAME))
    by_script = (*found.by_script, *axes_in_script(run.strategy))
    return Exported(NAME, text, differences, command, found.applied, by_script)


def applied(run: RunSpec) -> Strategy:
    """The strategy of a run as accelerate runs it."""
    return _comparison(run, _table(run)).applied


def _comparison(run: RunSpec, table: dict[str, Any]) -> Comparison:
    """The strategy as accelerate runs it with this table, and the differences."""
    strategy = run.strategy
    by_script: dict[str, object] = {
        "micro_batch": strategy.micro_batch,
        "accumulate": strategy.accumulate,
    }
    if table["distributed_type"] != "FSDP":
        by_script["recompute"] = recompute_all_or_none(strategy)
    if strategy.compress is not None:
        by_script |= {name: getattr(strategy, name) for name in COMPRESSION.fields}
    unsharded = strategy.sharded and table["distributed_type"] != "FSDP"
    rules = (_ON_CPUS, *_RULES) if unsharded else _RULES
    return compare(run, read(table).strategy, rules, by_script, _SCRIPT_RULES)


def _table(run: RunSpec) -> dict[str, Any]:
    """The keys and values of the YAML."""
    strategy, cluster = run.strategy, run.cluster
    cpu = cluster.device.is_cpu
    table: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(run),
        "mixed_precision": _precision(run),
        "num_machines": cluster.nodes,
        "num_processes": cluster.devices,
        "machine_rank": 0,
        "main_training_function": "main",
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": cpu,
    }
    if table["distributed_type"] == "FSDP":
        table["fsdp_config"] = _fsdp(run)
        if strategy.hybrid or strategy.mesh.inner > 1:
            table["parallelism_config"] = degrees(strategy)
    if strategy.compile:
        table["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_use_regional_compilation": True,
        }
    return table


def degrees(strategy: Strategy) -> dict[str, int]:
    """The degrees of accelerate's ParallelismConfig, without tensor or context degrees of 1."""
    mesh = strategy.mesh
    inner = {TENSOR: mesh.tensor, CONTEXT: mesh.context}
    return {
        REPLICATE: mesh.replicate,
        SHARD: mesh.shard,
        **{name: degree for name, degree in inner.items() if degree > 1},
    }


def axes_in_script(strategy: Strategy) -> list[Difference]:
    """What the user's script must do for tensor and context parallelism; empty without them."""
    differences = Differences()
    if strategy.tensor > 1:
        differences.add(
            "load the model divided, with from_pretrained(..., "
            f"distributed_config=DistributedConfig(tp_size={strategy.tensor}, "
            f"fsdp_size={strategy.shard})) of transformers; accelerate divides no matrices itself",
            about="Tensor parallelism",
        )
    if strategy.context > 1:
        differences.add(
            "shift labels, pass position_ids, and compute the loss inside "
            "accelerator.maybe_context_parallel, with buffers and their dimension; use SDPA "
            "attention",
            about="Context parallelism",
        )
    return differences


def _distributed_type(run: RunSpec) -> str:
    """The value of `distributed_type`."""
    if run.strategy.kind == "single":
        return "NO"
    if run.cluster.device.is_cpu:
        return "MULTI_CPU"
    return "FSDP" if run.strategy.sharded else "MULTI_GPU"


def _precision(run: RunSpec) -> str:
    """The value of `mixed_precision`."""
    strategy = run.strategy
    if strategy.master_dtype != "fp32" or strategy.param_dtype not in ("bf16", "fp16"):
        return "no"
    return strategy.param_dtype


def _fsdp(run: RunSpec) -> dict[str, Any]:
    """The section `fsdp_config`."""
    strategy = run.strategy
    table: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": strategy.reshard_after_forward is not False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_offload_params": strategy.offloads("parameters"),
        "fsdp_activation_checkpointing": strategy.recompute not in ("none", 0.0),
        "fsdp_cpu_ram_efficient_loading": False,
    }
    if isinstance(run.model, ModelSpec):
        # Without it accelerate reads the class from the model, as transformers' models name it.
        table["fsdp_transformer_layer_cls_to_wrap"] = BLOCKS[run.model.family].class_name
    return table


def _other_differences(run: RunSpec, table: dict[str, Any]) -> list[Difference]:
    """Differences in FSDP units, buckets, the loss and the script, which no strategy field says."""
    differences = Differences()
    model, sharded = run.model, table["distributed_type"] == "FSDP"
    if sharded and isinstance(model, ModuleRef):
        differences.add(
            "name the class of your blocks in fsdp_transformer_layer_cls_to_wrap; otherwise the "
            "whole model may become one unit",
            about="Units",
        )
    if sharded and isinstance(model, ModelSpec) and not model.tied:
        differences.add(
            "accelerate makes one unit of the embedding and one of the last norm and the head; "
            "Shardwise puts both in the root unit",
            about="Units",
        )
    if run.strategy.tensor > 1:
        differences.add(GATHERED_LOGITS, about="Loss")
    if run.strategy.kind == "ddp":
        differences.add(
            "accelerate's DDP keeps separate buckets, 4 bytes more per parameter; "
            "DistributedDataParallelKwargs(gradient_as_bucket_view=True) avoids that",
            about="Gradients",
        )
    if run.train is not None:
        differences.add(
            "optimizer, schedule, clipping, checkpoints and data are set by your script",
            about="[train]",
        )
    return differences


def _command(run: RunSpec, name: str) -> str:
    """The shell command that starts the run; `name` is the YAML."""
    words = ["accelerate launch --config_file", name]
    if run.strategy.accumulate > 1:
        words.insert(0, f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={run.strategy.accumulate}")
    if run.cluster.device.is_cpu and run.cluster.devices > 1:
        # Otherwise it starts one process, or several that do not know each other.
        words.insert(0, "ACCELERATE_USE_CPU=true")
        words.append("--multi_gpu")
    if run.cluster.nodes > 1:
        words.append("--main_process_ip HOST --main_process_port 29500 --machine_rank RANK")
    return " ".join((*words, "train.py"))
