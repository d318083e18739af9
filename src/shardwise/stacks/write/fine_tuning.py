"""Parts of the exports to all fine-tuning stacks: comparison, model and data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from shardwise.spec.adapter import Adapter
from shardwise.spec.chat import holds_chat
from shardwise.spec.hub import model_without_weights
from shardwise.spec.lookup import ModuleRef, config_folder
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.outcomes import Difference
from shardwise.stacks.read.imported import Imported
from shardwise.stacks.training_arguments import OPTIMIZERS
from shardwise.stacks.write.adapter_differences import adapter_differences, settings_differences
from shardwise.stacks.write.arguments import other_differences, rules_of
from shardwise.stacks.write.chat_differences import chat_differences
from shardwise.stacks.write.differences import Comparison, Rule, compare, padded_experts
from shardwise.stacks.write.exported import Exported, Setting

# Placeholder for a name that the user must fill in.
CHANGE_ME = "change-me"
# Formats of the datasets package by file ending.
_FORMATS = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".txt": "text"}
ENVIRONMENT = {"replicate": "PARALLELISM_CONFIG_DP_REPLICATE_SIZE",
               "shard": "PARALLELISM_CONFIG_DP_SHARD_SIZE"}  # fmt: skip
ENVIRONMENT_CONTEXT = "PARALLELISM_CONFIG_CP_SIZE"


class Stack(NamedTuple):
    """A fine-tuning stack that is configured by one YAML."""

    # The stack's name in sentences.
    who: str
    file: str
    table: Callable[[RunSpec], dict[str, Any]]
    read: Callable[[Mapping[str, object]], Imported]
    # Reasons that take precedence over those of TrainingArguments.
    rules: tuple[Rule, ...] = ()
    optimizers: Mapping[str, str] = OPTIMIZERS
    # Fields that the start command sets instead of the file.
    by_command: tuple[str, ...] = ()
    # What the stack does instead, by (setting, value) of chat data.
    chat: Mapping[tuple[str, str], str] = {}


def compare_with_stack(stack: Stack, run: RunSpec, table: dict[str, Any]) -> Comparison:
    """The strategy as the stack runs it with this table, and the differences."""
    strategy = run.strategy
    back = dict(stack.read(table).strategy)
    if strategy.kind == "single":
        # The launcher's number of processes decides whether DDP or one device runs.
        back["kind"] = "single"
    by_command: dict[str, object] = {}
    sharded = any(key in table for key in ("fsdp", "fsdp_config", "deepspeed"))
    if strategy.hybrid and sharded:
        by_command = {name: getattr(strategy, name) for name in stack.by_command}
    rules = (*stack.rules, *rules_of(run, sharded))
    set_by = (Rule(stack.by_command, "the start command below sets them"),)
    script_rules = set_by if stack.by_command else ()
    return compare(run, back, rules, by_command, script_rules, stack.who)


def applied(stack: Stack, run: RunSpec) -> Strategy:
    """The strategy of a run as the stack runs it."""
    return compare_with_stack(stack, run, stack.table(run)).applied


def write(stack: Stack, run: RunSpec, command: str, more: tuple[Difference, ...] = ()) -> Exported:
    """The run as the stack's YAML; `more` are differences of only this stack."""
    import yaml

    table = stack.table(run)
    found = compare_with_stack(stack, run, table)
    differences = (
        *found.differences,
        *padded_experts(run, found.applied, stack.who),
        *settings_differences(run, stack.read(table), stack.who),
        *other_differences(run, stack.who, stack.optimizers, with_deepspeed=True),
        *chat_differences(run, stack.chat),
        *more,
    )
    text = yaml.safe_dump(table, sort_keys=False, allow_unicode=True)
    by_script = (*found.by_script, *_placeholders(run, table))
    other = adapter_differences(run, stack.read(table), stack.who)
    changed: tuple[Setting, ...] = ("adapter",) if other else ()
    return Exported(stack.file, text, differences, command, found.applied, by_script, changed)


def _placeholders(run: RunSpec, table: Mapping[str, Any]) -> list[Difference]:
    """The placeholders in the file that the user must replace."""
    where = f"write the folder or the name on a hub of {run.model.name} into the file"
    missing = [
        Difference(where, about=key)
        for key in ("model_name_or_path", "base_model")
        if table.get(key) == CHANGE_ME
    ]
    if CHANGE_ME in str(table.get("dataset_name")) + str(table.get("datasets")):
        data = "write the name or the files of your data set into the file"
        missing.append(Difference(data, about="data"))
    return missing


def model_name(run: RunSpec) -> str:
    """The folder of the model, or its name on a hub; for a preset, a placeholder to fill in."""
    if isinstance(run.model, ModuleRef):
        raise SpecError(
            f"model: {run.model.factory} is a function of your own; this stack loads models of "
            "transformers: use accelerate, lightning or python"
        )
    # What is kept of a preset is its configuration, without weights.
    if run.model.config is None or getattr(run.model, "preset", None) is not None:
        return CHANGE_ME
    folder = config_folder(run.model.config)
    # Where only the configuration was looked up, the stack downloads the weights.
    return model_without_weights(folder) or str(folder)


def data_files(run: RunSpec) -> tuple[str, list[str]] | None:
    """(format, files) of the run's data for the datasets package; None without files."""
    if run.data is None or not run.data.path:
        return None
    kind = _FORMATS.get(Path(run.data.path[0]).suffix.lower(), "json")
    return kind, list(run.data.path)


def packs_sequences(run: RunSpec) -> bool:
    """Whether sequences are packed: always for text, as `data.packing` says for other data."""
    data = run.data
    return data is None or data.packing or not (data.synthetic or holds_chat(data))


def integer_alpha(adapter: Adapter) -> int:
    """LoRA's alpha rounded to an integer of at least 1, for stacks that accept only integers."""
    return max(1, round(adapter.scale))
