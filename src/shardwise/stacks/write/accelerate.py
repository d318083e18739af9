"""A run as the YAML of `accelerate config`. Checked against accelerate 1.15."""

from __future__ import annotations

from typing import Any

from shardwise.spec.families import BLOCKS
from shardwise.spec.lookup import ModuleRef
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.stacks.read.accelerate import REPLICATE, SHARD, read
from shardwise.stacks.write.differences import Rule, losses
from shardwise.stacks.write.exported import Exported

NAME = "accelerate.yaml"

_RULES = (
    Rule(
        ("kind",),
        "there it is {kind}, with parameters that stay gathered from the forward to the backward",
    ),
    Rule(
        ("param_dtype", "master_dtype"),
        "mixed_precision knows fp32, bf16 and fp16 over an fp32 master; here it is {param_dtype}, "
        "and another dtype is the one in which your script loads the model",
    ),
    Rule(
        ("reduce_dtype",),
        "gradients are reduced in {reduce_dtype} there, which mixed_precision decides; a "
        "FullyShardedDataParallelPlugin of your script can name another in mixed_precision_policy",
    ),
    Rule(
        ("reshard_after_forward",),
        "fsdp_reshard_after_forward knows true and false only, and parameters are gathered again "
        "from the whole shard group",
    ),
    Rule(
        ("grad_sync", "reshard_after_backward"),
        "Accelerator.accumulate keeps gradients whole until the last micro-batch and gathers "
        "parameters anew for each; GradientAccumulationPlugin(sync_each_batch=True) reduces every "
        "micro-batch",
    ),
    Rule(("prefetch", "forward_prefetch"), "FSDP2's own order holds, one unit ahead"),
    Rule(("blocks_per_unit",), "every block is a unit"),
    Rule(("ddp_bucket_mib",), "DDP's own 25 MiB hold; DistributedDataParallelKwargs changes them"),
    Rule(("micro_batch",), "it is the batch_size of the DataLoader of your script"),
    Rule(
        ("accumulate",),
        "it is gradient_accumulation_steps of the Accelerator of your script, which the variable "
        "in the command below sets",
    ),
)
_ALL_OR_NOTHING = Rule(
    ("recompute",), "fsdp_activation_checkpointing recomputes every block in full, or none"
)
_BY_SCRIPT = Rule(
    ("recompute",),
    "the file cannot ask for it without FSDP; call model.gradient_checkpointing_enable()",
)
_ON_CPUS = Rule(
    ("kind", "shard", "replicate", "offload", "recompute", "reshard_after_forward", "reduce_dtype"),
    "accelerate shards on GPUs only; on CPUs the file runs DDP",
)


def export(run: RunSpec) -> Exported:
    """The YAML that `accelerate launch --config_file` takes."""
    import yaml

    table = _table(run)
    text = yaml.safe_dump(table, sort_keys=False)
    sharded = table["distributed_type"] == "FSDP"
    recompute = _ALL_OR_NOTHING if sharded else _BY_SCRIPT
    ungated = run.strategy.sharded and not sharded
    rules = (_ON_CPUS, *_RULES, recompute) if ungated else (*_RULES, recompute)
    said = losses(run, read(table).strategy, rules)
    return Exported(NAME, text, (*said, *_beside(run, sharded)), _command(run))


def _table(run: RunSpec) -> dict[str, Any]:
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
        if strategy.hybrid:
            table["parallelism_config"] = {REPLICATE: strategy.replicate, SHARD: strategy.shard}
    if strategy.compile:
        table["dynamo_config"] = {
            "dynamo_backend": "INDUCTOR",
            "dynamo_use_regional_compilation": True,
        }
    return table


def _distributed_type(run: RunSpec) -> str:
    if run.strategy.kind == "single":
        return "NO"
    if run.cluster.device.is_cpu:
        return "MULTI_CPU"
    return "FSDP" if run.strategy.sharded else "MULTI_GPU"


def _precision(run: RunSpec) -> str:
    strategy = run.strategy
    if strategy.master_dtype != "fp32" or strategy.param_dtype not in ("bf16", "fp16"):
        return "no"
    return strategy.param_dtype


def _fsdp(run: RunSpec) -> dict[str, Any]:
    strategy = run.strategy
    table: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": strategy.reshard_after_forward is not False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_offload_params": strategy.offload,
        "fsdp_activation_checkpointing": strategy.recompute not in ("none", 0.0),
        "fsdp_cpu_ram_efficient_loading": False,
    }
    if isinstance(run.model, ModelSpec):
        # Without it accelerate asks the model, which a model of transformers answers.
        table["fsdp_transformer_layer_cls_to_wrap"] = BLOCKS[run.model.family].class_name
    return table


def _beside(run: RunSpec, sharded: bool) -> list[str]:
    """What no field of a strategy says, but happens differently there."""
    said = []
    model = run.model
    if sharded and isinstance(model, ModuleRef):
        said.append(
            "Units: name the class of the blocks in fsdp_transformer_layer_cls_to_wrap; without it "
            "the whole model may become one unit."
        )
    if sharded and isinstance(model, ModelSpec) and not model.tied:
        said.append(
            "Units: the embedding is one of its own there, and so are the last norm and the head "
            "together, where Shardwise has one root unit."
        )
    if run.strategy.kind == "ddp":
        said.append(
            "Gradients: accelerate's DDP keeps its buckets beside them, 4 bytes more for every "
            "parameter; DistributedDataParallelKwargs(gradient_as_bucket_view=True) avoids that."
        )
    if run.train is not None:
        said.append(
            "[train]: optimizer, schedule, clipping, checkpoints and data are those of your script."
        )
    return said


def _command(run: RunSpec) -> str:
    words = ["accelerate launch --config_file", NAME]
    if run.strategy.accumulate > 1:
        words.insert(0, f"ACCELERATE_GRADIENT_ACCUMULATION_STEPS={run.strategy.accumulate}")
    if run.cluster.device.is_cpu and run.cluster.devices > 1:
        # Otherwise it starts one process, or several that do not know each other.
        words.insert(0, "ACCELERATE_USE_CPU=true")
        words.append("--multi_gpu")
    if run.cluster.nodes > 1:
        words.append("--main_process_ip HOST --main_process_port 29500 --machine_rank RANK")
    return " ".join((*words, "train.py"))
