"""Write a run as transformers' TrainingArguments: JSON, or a script if it has adapters."""

from __future__ import annotations

import json
from typing import Any

from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.outcomes import Difference, Differences
from shardwise.stacks.read.trainer import read
from shardwise.stacks.write import trainer_peft
from shardwise.stacks.write.accelerate import axes_in_script
from shardwise.stacks.write.adapter_differences import settings_differences
from shardwise.stacks.write.arguments import (
    TRAINER,
    arguments,
    by_parallelism_config,
    other_differences,
    rules_of,
)
from shardwise.stacks.write.differences import (
    EXPERTS_AT_LOADING,
    Comparison,
    Rule,
    compare,
    padded_experts,
)
from shardwise.stacks.write.exported import DEFAULT_TARGET, Exported, Target
from shardwise.stacks.write.torchrun import script_command

NAME = "trainer.json"

_SCRIPT_RULES = (
    Rule(
        ("shard", "replicate"),
        "pass parallelism_config=ParallelismConfig(dp_replicate_size={replicate}, "
        "dp_shard_size={shard}) of accelerate to TrainingArguments; JSON cannot hold it",
    ),
)
_WITH_AXES = Rule(
    ("shard", "replicate", "tensor", "context", "sequence_parallel", "context_method"),
    "pass parallelism_config=ParallelismConfig(dp_replicate_size={replicate}, "
    "dp_shard_size={shard}, tp_size={tensor}, cp_size={context}) of accelerate to "
    "TrainingArguments; JSON cannot hold it",
)


def export(run: RunSpec, target: Target = DEFAULT_TARGET) -> Exported:
    """The run as JSON for `HfArgumentParser((TrainingArguments,)).parse_json_file`.

    With adapters it is a script.
    """
    table = arguments(run)
    found = _comparison(run, table)
    if run.adapter is not None:
        return trainer_peft.export(run, table, found, target)
    experts = padded_experts(run, found.applied, "the Trainer")
    recipe = settings_differences(run, read(table), TRAINER)
    differences = [*found.differences, *experts, *recipe, *other_differences(run)]
    if run.train is not None:
        data = Difference("data and tokenizer are set by your script", about="[data]")
        differences.append(data)
    text = json.dumps(table, indent=2) + "\n"
    command = script_command(run, f"train.py {target.name(NAME)}")
    by_script = _by_script(run, found)
    return Exported(NAME, text, tuple(differences), command, found.applied, by_script)


def applied(run: RunSpec) -> Strategy:
    """The strategy of a run as transformers' Trainer runs it."""
    return _comparison(run, arguments(run)).applied


def _comparison(run: RunSpec, table: dict[str, Any]) -> Comparison:
    """The strategy as the Trainer runs it with this table, and the differences."""
    strategy = run.strategy
    by_script: dict[str, object] = {}
    if "fsdp" in table and (strategy.hybrid or strategy.mesh.inner > 1):
        by_script = by_parallelism_config(strategy)
    script_rules = _SCRIPT_RULES if strategy.mesh.inner == 1 else (_WITH_AXES,)
    back = dict(read(table).strategy)
    if strategy.kind == "single":
        # The launcher's number of processes decides whether DDP or one device runs.
        back["kind"] = "single"
    rules = (EXPERTS_AT_LOADING, *rules_of(run, sharded="fsdp" in table))
    return compare(run, back, rules, by_script, script_rules, TRAINER)


def _by_script(run: RunSpec, found: Comparison) -> tuple[Difference, ...]:
    """Settings that belong in the user's script."""
    differences = Differences(found.by_script)
    if run.strategy.tensor > 1:
        differences += axes_in_script(run.strategy.but(context=1))
    if not run.strategy.sharded and run.strategy.master_dtype == "fp32":
        differences.add(
            "load the model with dtype=torch.float32; transformers 5 loads the dtype of the "
            "checkpoint otherwise",
            {"master_dtype": "fp32"},
        )
    differences.add(
        "truncate or pack sequences to it; TRL's SFTConfig takes max_length",
        {"seq_len": run.job.seq_len},
    )
    return tuple(differences)
