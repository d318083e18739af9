"""Write a run as the YAML of axolotl. Checked against axolotl 0.19."""

from __future__ import annotations

from typing import Any

from shardwise.spec.adapter import ALL_LINEAR, Adapter
from shardwise.spec.chat import holds_chat
from shardwise.spec.families import BLOCKS
from shardwise.spec.lookup import Model
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import TrainSettings
from shardwise.stacks.attention import attention_name, write_attention
from shardwise.stacks.read.axolotl import read
from shardwise.stacks.table import write_rows
from shardwise.stacks.training_arguments import (
    AXOLOTL_BATCH,
    AXOLOTL_METHODS,
    AXOLOTL_OPTIMIZERS,
    AXOLOTL_TRAIN,
)
from shardwise.stacks.write import fine_tuning
from shardwise.stacks.write.deepspeed import config_for_trainer
from shardwise.stacks.write.differences import Rule, recompute_all_or_none
from shardwise.stacks.write.exported import DEFAULT_TARGET, Exported, Target
from shardwise.stacks.write.fine_tuning import (
    CHANGE_ME,
    Stack,
    data_files,
    integer_alpha,
    model_name,
    packs_sequences,
)
from shardwise.stacks.write.method import in_examples
from shardwise.stacks.write.trackers import trackers_of

NAME = "axolotl.yaml"
_RULES = (
    Rule(
        ("param_dtype", "master_dtype"),
        "axolotl loads the model in the dtype that it computes in, and only FSDP2 makes trained "
        "parameters fp32: {param_dtype} over {master_dtype}",
    ),
)


def export(run: RunSpec, target: Target = DEFAULT_TARGET) -> Exported:
    """The run as YAML for `axolotl train`."""
    return fine_tuning.write(_STACK, run, _command(run, target.name(NAME)))


def applied(run: RunSpec) -> Strategy:
    """The strategy of a run as axolotl runs it."""
    return fine_tuning.applied(_STACK, run)


def _table(run: RunSpec) -> dict[str, Any]:
    """The keys and values of the YAML."""
    strategy = run.strategy
    cpu = run.cluster.device.is_cpu
    table: dict[str, Any] = {
        "base_model": model_name(run),
        **_trained(run.adapter, run.model),
        **_data(run),
        **write_rows(AXOLOTL_BATCH, run),
        **_precision(strategy),
        "gradient_checkpointing": recompute_all_or_none(strategy) == "full",
        "output_dir": run.train.folder if run.train else "runs",
    }
    if run.job.method == "dpo":
        table |= {"rl": "dpo", "sample_packing": False}
    table = in_examples(run, table, "micro_batch_size")
    if strategy.sharded and not cpu:
        table |= {"deepspeed": config_for_trainer(run)} if strategy.kind == "zero1" else _fsdp(run)
    table |= write_rows(AXOLOTL_METHODS, run)
    if run.train is not None:
        table |= _train(run, run.train)
    else:
        # axolotl refuses a file without a learning rate.
        table["learning_rate"] = TrainSettings().learning_rate
    return table


# The linear layers of a mixture with formulas.
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


def _trained(adapter: Adapter | None, model: Model) -> dict[str, Any]:
    """The keys about which parameters are trained; empty if all are."""
    if adapter is None:
        return {}
    if adapter.rank is None:
        return {"unfrozen_parameters": list(adapter.train)}
    table: dict[str, Any] = {
        "adapter": "qlora" if adapter.base == "nf4" else "lora",
        "load_in_4bit": adapter.base == "nf4",
        "load_in_8bit": adapter.base == "int8",
        "lora_r": adapter.rank,
        "lora_alpha": integer_alpha(adapter),
        "lora_dropout": adapter.dropout,
    }
    stored = isinstance(model, ModelSpec) and model.experts and adapter.quantises_experts
    if stored:
        table["quantize_moe_experts"] = True
    if stored and adapter.targets == (ALL_LINEAR,):
        # axolotl refuses lora_target_linear beside quantised experts.
        table["lora_target_modules"] = list(_ATTENTION)
    elif adapter.targets == (ALL_LINEAR,):
        table["lora_target_linear"] = True
    else:
        table["lora_target_modules"] = list(adapter.targets)
    if adapter.rslora:
        table["peft_use_rslora"] = True
    if adapter.dora:
        table["peft_use_dora"] = True
    if adapter.train:
        table["lora_modules_to_save"] = list(adapter.train)
    return table


def _data(run: RunSpec) -> dict[str, Any]:
    """The keys about the data."""
    packed = packs_sequences(run)
    found = data_files(run)
    if found is None:
        sets: list[dict[str, Any]] = [{"path": CHANGE_ME, "type": "chat_template"}]
    else:
        kind, files = found
        field = run.data.text_key if run.data is not None else "text"
        form = (
            {"type": "chat_template"}
            if holds_chat(run.data)
            else {"type": "completion", "field": field}
        )
        sets = [{"path": file, "ds_type": kind, **form} for file in files]
    table: dict[str, Any] = {
        "datasets": sets,
        "sample_packing": packed,
        "pad_to_sequence_len": True,
    }
    if packed and not run.cluster.device.is_cpu:
        # Packing needs an attention that knows where sequences begin.
        table["attn_implementation"] = attention_name(run, "flash_attention_2")
    return {**table, **write_attention(run)}


def _precision(strategy: Strategy) -> dict[str, bool]:
    """The keys about the dtypes of computation and loading."""
    low = strategy.param_dtype
    if low not in ("bf16", "fp16"):
        return {"bf16": False}
    if strategy.master_dtype == low and strategy.sharded:
        # Without mixed precision FSDP2 leaves parameters as they are loaded.
        return {"bfloat16" if low == "bf16" else "float16": True}
    return {low: True}


def _fsdp(run: RunSpec) -> dict[str, Any]:
    """The keys about FSDP2 and the parallel degrees."""
    strategy = run.strategy
    config: dict[str, Any] = {
        "reshard_after_forward": strategy.reshard_after_forward is not False,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "state_dict_type": "SHARDED_STATE_DICT",
        "offload_params": strategy.offloads("parameters"),
        "activation_checkpointing": recompute_all_or_none(strategy) == "full",
        "cpu_ram_efficient_loading": False,
    }
    if isinstance(run.model, ModelSpec):
        config["transformer_layer_cls_to_wrap"] = BLOCKS[run.model.family].class_name
    # Both at once would recompute twice.
    table: dict[str, Any] = {
        "fsdp_version": 2, "fsdp_config": config, "gradient_checkpointing": False,
    }  # fmt: skip
    if strategy.hybrid or strategy.mesh.inner > 1:
        table |= {"dp_replicate_size": strategy.replicate, "dp_shard_size": strategy.shard}
    if strategy.tensor > 1:
        table["tensor_parallel_size"] = strategy.tensor
    if strategy.context > 1:
        # axolotl's ring attention needs flash attention.
        table |= {
            "context_parallel_size": strategy.context, "attn_implementation": "flash_attention_2",
        }  # fmt: skip
    return table


def _train(run: RunSpec, train: TrainSettings) -> dict[str, Any]:
    """The keys for `[train]`, with trackers and checkpoints."""
    table = write_rows(AXOLOTL_TRAIN, run)
    table |= {f"use_{name}": True for name in trackers_of(train)}
    save = train.checkpoint
    if not save.save:
        return {**table, "save_strategy": "no"}
    if save.every is not None:
        table["save_steps"] = save.every
    return {**table, "save_total_limit": save.keep} if save.keep else table


def _command(run: RunSpec, name: str) -> str:
    """The shell command that starts the run; `name` is the YAML."""
    cluster = run.cluster
    if cluster.devices == 1:
        return f"axolotl train {name} --launcher python"
    places = f"--nproc-per-node {cluster.devices_per_node}"
    if cluster.nodes > 1:
        meet = "--rdzv-backend c10d --rdzv-endpoint HOST:29400"
        places = f"--nnodes {cluster.nodes} {places} {meet}"
    return f"axolotl train {name} --launcher torchrun -- {places}"


_CHAT = {
    ("loss_on", "all"): "axolotl computes the loss on answers only; set roles_to_train of the data "
    "set to all roles",
}
_STACK = Stack("axolotl", NAME, _table, read, _RULES, AXOLOTL_OPTIMIZERS, chat=_CHAT)
