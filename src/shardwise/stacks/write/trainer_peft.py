"""Write a run with adapters as a script: TrainingArguments, peft's LoraConfig and the Trainer."""

from __future__ import annotations

from typing import Any

from shardwise.spec.adapter import ALL_LINEAR, Adapter
from shardwise.spec.dtype import TORCH_NAMES
from shardwise.spec.foreign_text import one_line
from shardwise.spec.run import RunSpec
from shardwise.stacks.outcomes import Difference
from shardwise.stacks.read import torch_script
from shardwise.stacks.read.trainer_script import TRAIN_ONLY
from shardwise.stacks.write.adapter_differences import adapter_differences, settings_differences
from shardwise.stacks.write.arguments import TRAINER, other_differences
from shardwise.stacks.write.chat_differences import stream_differences
from shardwise.stacks.write.differences import Comparison, padded_experts
from shardwise.stacks.write.exported import Exported, Setting, Target
from shardwise.stacks.write.fine_tuning import CHANGE_ME, data_files, model_name
from shardwise.stacks.write.torchrun import script_command

NAME = "train_lora.py"

_BODY = '''

def packed(tokenizer):
    """All texts as one stream of tokens, cut into sequences of SEQ_LEN."""
    texts = load_dataset(FORMAT, data_files=DATA, split="train")

    def cut(rows):
        ends = [tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else []
        ids = [token for text in rows[TEXT] for token in [*tokenizer(text)["input_ids"], *ends]]
        parts = [ids[at : at + SEQ_LEN] for at in range(0, len(ids) - SEQ_LEN + 1, SEQ_LEN)]
        return {"input_ids": parts, "labels": [list(part) for part in parts]}

    return texts.map(cut, batched=True, batch_size=None, remove_columns=texts.column_names)


def main():
    args = arguments()
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    data = packed(tokenizer)
    trainer = Trainer(
        model=adapted_model(), args=args, train_dataset=data, data_collator=default_data_collator
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
'''


def export(run: RunSpec, table: dict[str, Any], found: Comparison, target: Target) -> Exported:
    """The script of a run with adapters.

    `table` are its TrainingArguments; `found` compares the strategy with them.
    """
    adapter = run.adapter
    assert adapter is not None
    text = _script(run, table, adapter)
    back = torch_script.read(text)
    differences = (
        *found.differences,
        *padded_experts(run, found.applied, TRAINER),
        *settings_differences(run, back, TRAINER),
        *other_differences(run),
        *stream_differences(run, "the script"),
    )
    to_fill_in = [
        Difference(f"write {what} into the script", about=name)
        for name, value, what in (
            ("MODEL", model_name(run), f"the folder or the name on a hub of {run.model.name}"),
            ("DATA", data_files(run) or CHANGE_ME, "the files of your data set"),
        )
        if value == CHANGE_ME
    ]
    command = script_command(run, target.name(NAME))
    changed: tuple[Setting, ...] = ("adapter",) if adapter_differences(run, back, TRAINER) else ()
    return Exported(NAME, text, differences, command, found.applied, tuple(to_fill_in), changed)


def _script(run: RunSpec, table: dict[str, Any], adapter: Adapter) -> str:
    """The text of the script."""
    hybrid = run.strategy.hybrid and "fsdp" in table
    kind, files = data_files(run) or ("json", [CHANGE_ME])
    text_key = run.data.text_key if run.data is not None else "text"
    quantised = "BitsAndBytesConfig, " if adapter.quantised else ""
    lines = [
        f"# Fine-tunes {one_line(run.model.name)} with peft and transformers' Trainer.",
        "import torch",
        "from accelerate import ParallelismConfig" if hybrid else "",
        "from datasets import load_dataset",
        "from peft import LoraConfig, get_peft_model" if adapter.rank is not None else "",
        f"from transformers import AutoModelForCausalLM, AutoTokenizer, {quantised}Trainer",
        "from transformers import TrainingArguments, default_data_collator",
        "\n" + f"MODEL = {model_name(run)!r}",
        f"FORMAT, DATA, TEXT = {kind!r}, {files!r}, {text_key!r}",
        f"SEQ_LEN = {run.job.seq_len}",
    ]
    if adapter.rank is None:
        lines.append(f"{TRAIN_ONLY} = {list(adapter.train)!r}")
    lines += ["\n\ndef arguments():", *_arguments(run, table, hybrid)]
    lines += ["\n\ndef adapted_model():", *_model(adapter)]
    return "\n".join(line for line in lines if line) + "\n" + _BODY


def _arguments(run: RunSpec, table: dict[str, Any], hybrid: bool) -> list[str]:
    """The lines that return TrainingArguments; with `hybrid` they set a ParallelismConfig."""
    lines = [f"        {key}={value!r}," for key, value in table.items()]
    if hybrid:
        strategy = run.strategy
        degrees = f"dp_replicate_size={strategy.replicate}, dp_shard_size={strategy.shard}"
        lines.append(f"        parallelism_config=ParallelismConfig({degrees}),")
    return ["    return TrainingArguments(", *lines, "    )"]


def _model(adapter: Adapter) -> list[str]:
    """The lines that load the model and add its adapters."""
    dtype = f"torch.{TORCH_NAMES[adapter.float_dtype]}"
    lines = ["    model = AutoModelForCausalLM.from_pretrained(", "        MODEL,"]
    lines += [f"        dtype={dtype},", *_quantised(adapter, dtype), "    )"]
    if adapter.rank is None:
        return [
            *lines,
            "    for name, parameter in model.named_parameters():",
            f"        parameter.requires_grad = any(part in name for part in {TRAIN_ONLY})",
            "    return model",
        ]
    everywhere = adapter.targets == (ALL_LINEAR,)
    settings: dict[str, Any] = {
        "task_type": "CAUSAL_LM",
        "r": adapter.rank,
        "lora_alpha": int(adapter.scale) if adapter.scale.is_integer() else adapter.scale,
        "lora_dropout": adapter.dropout,
        "target_modules": ALL_LINEAR if everywhere else list(adapter.targets),
        "use_rslora": adapter.rslora,
        "use_dora": adapter.dora,
    }
    if adapter.train:
        settings["modules_to_save"] = list(adapter.train)
    return [
        *lines,
        # Recompute needs an input that has a gradient.
        "    model.enable_input_require_grads()",
        "    lora = LoraConfig(",
        *(f"        {key}={value!r}," for key, value in settings.items()),
        "    )",
        "    return get_peft_model(model, lora)",
    ]


def _quantised(adapter: Adapter, dtype: str) -> list[str]:
    """The lines that load quantised weights; empty without quantisation."""
    if adapter.base == "int8":
        return ["        quantization_config=BitsAndBytesConfig(load_in_8bit=True),"]
    if adapter.base != "nf4":
        return []
    return [
        "        quantization_config=BitsAndBytesConfig(",
        "            load_in_4bit=True,",
        '            bnb_4bit_quant_type="nf4",',
        "            bnb_4bit_use_double_quant=True,",
        f"            bnb_4bit_compute_dtype={dtype},",
        "            # FSDP shards floating-point tensors only.",
        f"            bnb_4bit_quant_storage={dtype},",
        "        ),",
    ]
