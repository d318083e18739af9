"""Write a run as the YAML of `trl sft --config` or `trl dpo --config`. Checked against TRL 1.16."""

from __future__ import annotations

from typing import Any

from shardwise.spec.adapter import Adapter
from shardwise.spec.chat import holds_chat
from shardwise.spec.dtype import TORCH_NAMES
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.attention import write_attention
from shardwise.stacks.outcomes import Difference
from shardwise.stacks.read.trainer import ENVIRONMENT as USES_GROUPS
from shardwise.stacks.read.trainer import read_trl
from shardwise.stacks.write import fine_tuning
from shardwise.stacks.write.arguments import arguments
from shardwise.stacks.write.differences import Rule
from shardwise.stacks.write.exported import DEFAULT_TARGET, Exported, Target
from shardwise.stacks.write.fine_tuning import (
    CHANGE_ME,
    ENVIRONMENT,
    ENVIRONMENT_CONTEXT,
    Stack,
    data_files,
    integer_alpha,
    model_name,
    packs_sequences,
)
from shardwise.stacks.write.method import in_examples, reference_difference

NAME = "trl.yaml"
_RULES = (
    Rule(
        ("loss", "loss_chunks", "loss_kernel"),
        "SFTTrainer computes head and loss in tiles: loss {loss}",
    ),
)


def export(run: RunSpec, target: Target = DEFAULT_TARGET) -> Exported:
    """The run as YAML for `trl sft --config` or `trl dpo --config`."""
    adapter = run.adapter
    more: tuple[Difference, ...] = ()
    master = run.strategy.master_dtype
    if adapter is not None and adapter.quantised and master != "bf16":
        kept = f"TRL keeps those of quantised models in bf16; Shardwise in {master}"
        more = (Difference(kept, about="Adapters"),)
    more += reference_difference(run)
    return fine_tuning.write(_STACK, run, _command(run, target.name(NAME)), more)


def applied(run: RunSpec) -> Strategy:
    """The strategy of a run as TRL runs it."""
    return fine_tuning.applied(_STACK, run)


def _table(run: RunSpec) -> dict[str, Any]:
    """The keys and values of the YAML."""
    strategy, adapter = run.strategy, run.adapter
    stored = strategy.master_dtype if adapter is None else adapter.float_dtype
    table: dict[str, Any] = {"model_name_or_path": model_name(run), "dtype": TORCH_NAMES[stored]}
    if adapter is not None and adapter.rank is not None:
        table |= _lora(adapter)
    table |= {**_data(run), "max_length": run.job.seq_len}
    dpo = run.job.method == "dpo"
    if dpo:
        table |= {"beta": 0.1, "precompute_ref_log_probs": not run.job.has_reference}
    else:
        table["packing"] = packs_sequences(run)
    if table.get("packing") and not holds_chat(run.data):
        # One stream of tokens, cut where a sequence is full.
        table["packing_strategy"] = "wrapped"
    # TRL's defaults are true.
    defaults = {"bf16": False, "gradient_checkpointing": False}
    table |= {**defaults, **arguments(run, with_deepspeed=True)}
    table |= write_attention(run)
    # TRL has a fused head of its own.
    table.pop("use_liger_kernel", None)
    if "fsdp" in table and (strategy.hybrid or strategy.context > 1):
        degrees = {name: str(getattr(strategy, field)) for field, name in ENVIRONMENT.items()}
        table["env"] = {USES_GROUPS: "true", **degrees}
    if strategy.context > 1:
        table["env"][ENVIRONMENT_CONTEXT] = str(strategy.context)
        # Each device takes a piece of the first half of a sequence and one of the second half.
        table["pad_to_multiple_of"] = 2 * strategy.context
        table["attn_implementation"] = "sdpa"
    return in_examples(run, table, "per_device_train_batch_size")


def _lora(adapter: Adapter) -> dict[str, Any]:
    """The keys about LoRA and quantised weights."""
    table: dict[str, Any] = {
        "use_peft": True,
        "lora_r": adapter.rank,
        "lora_alpha": integer_alpha(adapter),
        "lora_dropout": adapter.dropout,
        "lora_target_modules": list(adapter.targets),
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
    }
    if adapter.train:
        table["lora_modules_to_save"] = list(adapter.train)
    if adapter.base == "nf4":
        table |= {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "use_bnb_nested_quant": True,
            # FSDP shards floating-point tensors only.
            "bnb_4bit_quant_storage": "bfloat16",
        }
    elif adapter.base == "int8":
        table["load_in_8bit"] = True
    return table


def _data(run: RunSpec) -> dict[str, Any]:
    """The keys about the data."""
    found = data_files(run)
    if found is None:
        return {"dataset_name": CHANGE_ME}
    kind, files = found
    table: dict[str, Any] = {"datasets": [{"path": kind, "data_files": files}]}
    if run.data is not None and run.data.text_key != "text":
        table["dataset_text_field"] = run.data.text_key
    return table


def _command(run: RunSpec, name: str) -> str:
    """The shell command that starts the run; `name` is the YAML."""
    cluster = run.cluster
    words = [f"trl {run.job.method or 'sft'} --config", name]
    if cluster.devices > 1:
        words.append(f"--num_processes {cluster.devices}")
        words.append("--multi_gpu")
    if cluster.device.is_cpu:
        words.insert(0, "ACCELERATE_USE_CPU=true")
    if cluster.nodes > 1:
        words.append(f"--num_machines {cluster.nodes} --machine_rank RANK")
        words.append("--main_process_ip HOST --main_process_port 29500")
    return " ".join(words)


_CHAT = {
    ("loss_on", "answers"): "TRL computes the loss on every token of messages; set "
    "assistant_only_loss: true if the chat template marks answers",
    ("loss_on", "all"): "of prompt and completion TRL computes the loss on the completion; set "
    "completion_only_loss: false",
    ("packing", "true"): "TRL keeps packed examples apart only with flash attention; set "
    "attn_implementation",
}
_STACK = Stack("TRL", NAME, _table, read_trl, _RULES, chat=_CHAT)
