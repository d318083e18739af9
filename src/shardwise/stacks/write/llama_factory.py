"""Write a run as the YAML of `llamafactory-cli train`. Checked against LLaMA-Factory 0.9.5."""

from __future__ import annotations

from typing import Any

from shardwise.spec.adapter import ALL_LINEAR, Adapter
from shardwise.spec.chat import holds_chat
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.attention import write_flash_attn
from shardwise.stacks.outcomes import Difference
from shardwise.stacks.read.llama_factory import LIGER, read
from shardwise.stacks.read.trainer import ENVIRONMENT as USES_GROUPS
from shardwise.stacks.write import fine_tuning
from shardwise.stacks.write.arguments import arguments
from shardwise.stacks.write.differences import recompute_all_or_none
from shardwise.stacks.write.exported import DEFAULT_TARGET, Exported, Target
from shardwise.stacks.write.fine_tuning import (
    CHANGE_ME,
    ENVIRONMENT,
    Stack,
    data_files,
    integer_alpha,
    model_name,
    packs_sequences,
)
from shardwise.stacks.write.method import in_examples

NAME = "llama-factory.yaml"


def export(run: RunSpec, target: Target = DEFAULT_TARGET) -> Exported:
    """The run as YAML for `llamafactory-cli train`."""
    exported = fine_tuning.write(_STACK, run, _command(run, target.name(NAME)))
    files = data_files(run)
    where = f"your files ({', '.join(files[1])[:120]})" if files else "your data set"
    enter = f"enter {where} in data/dataset_info.json and write its name into the file"
    template = f"write the name of the chat template of {run.model.name} into the file"
    missing = Difference(enter, about="dataset"), Difference(template, about="template")
    return exported._replace(by_script=(*exported.by_script, *missing))


def applied(run: RunSpec) -> Strategy:
    """The strategy of a run as LLaMA-Factory runs it."""
    return fine_tuning.applied(_STACK, run)


def _table(run: RunSpec) -> dict[str, Any]:
    """The keys and values of the YAML."""
    strategy = run.strategy
    table: dict[str, Any] = {
        "model_name_or_path": model_name(run),
        "stage": "sft",
        "do_train": True,
        **_trained(run.adapter),
        "dataset": CHANGE_ME,
        "template": "default",
        "cutoff_len": run.job.seq_len,
        "packing": packs_sequences(run),
        # By default LLaMA-Factory recomputes every block, sharded or not.
        "disable_gradient_checkpointing": recompute_all_or_none(strategy) == "none",
        **arguments(run, with_deepspeed=True),
    }
    table.pop("gradient_checkpointing", None)
    table |= write_flash_attn(run)
    if table.pop("use_liger_kernel", False):
        table[LIGER] = True
    if run.job.method == "dpo":
        loss = "sigmoid" if run.job.has_reference else "simpo"
        table |= {"stage": "dpo", "pref_loss": loss, "pref_beta": 0.1, "packing": False}
    table = in_examples(run, table, "per_device_train_batch_size")
    if "fsdp_config" in table:
        table["fsdp_config"]["activation_checkpointing"] = False
    if holds_chat(run.data) and packs_sequences(run):
        # Sequences in one row do not see each other.
        table["neat_packing"] = True
    if strategy.param_dtype == strategy.master_dtype == "bf16":
        table["pure_bf16"] = True
    return table


def _trained(adapter: Adapter | None) -> dict[str, Any]:
    """The keys about which parameters are trained: all, or LoRA."""
    if adapter is None or adapter.rank is None:
        return {"finetuning_type": "full"}
    everywhere = adapter.targets == (ALL_LINEAR,)
    table: dict[str, Any] = {
        "finetuning_type": "lora",
        "lora_rank": adapter.rank,
        "lora_alpha": integer_alpha(adapter),
        "lora_dropout": adapter.dropout,
        "lora_target": "all" if everywhere else ",".join(adapter.targets),
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
    }
    if adapter.train:
        table["additional_target"] = ",".join(adapter.train)
    if adapter.quantised:
        table |= {
            "quantization_bit": 4 if adapter.base == "nf4" else 8,
            "quantization_method": "bnb",
        }
    if adapter.base == "nf4":
        table |= {"quantization_type": "nf4", "double_quantization": True}
    return table


def _command(run: RunSpec, name: str) -> str:
    """The shell command that starts the run; `name` is the YAML."""
    strategy, cluster = run.strategy, run.cluster
    words = [f"llamafactory-cli train {name}"]
    if cluster.devices > 1:
        words.insert(0, f"FORCE_TORCHRUN=1 NPROC_PER_NODE={cluster.devices_per_node}")
    if cluster.nodes > 1:
        words.insert(0, f"NNODES={cluster.nodes} NODE_RANK=RANK MASTER_ADDR=HOST MASTER_PORT=29500")
    if strategy.sharded and strategy.kind != "zero1" and not cluster.device.is_cpu:
        # LLaMA-Factory reads this variable before it loads quantised weights.
        words.insert(0, "ACCELERATE_USE_FSDP=true")
        if strategy.hybrid:
            degrees = (f"{name}={getattr(strategy, f)}" for f, name in ENVIRONMENT.items())
            words.insert(0, " ".join((f"{USES_GROUPS}=true", *degrees)))
    return " ".join(words)


_CHAT = {
    ("loss_on", "all"): "LLaMA-Factory computes the loss on answers only; set train_on_prompt: "
    "true",
}
_STACK = Stack("LLaMA-Factory", NAME, _table, read, by_command=("shard", "replicate"), chat=_CHAT)
