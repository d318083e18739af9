"""Recipes survive an import: as the stack's own package reads them, and back without a change."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.spec.run import RunSpec, read_run
from shardwise.spec.train import TrainSettings
from shardwise.stacks.read.imports import import_file
from shardwise.stacks.write.edits import edits_of
from shardwise.stacks.write.exports import export_run
from tests.command import shardwise as command
from tests.stacks.recipes import RECIPES, Recipe

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[2]
BY_TABLE = [name for name, one in RECIPES.items() if one.stack != "torchtitan"]
BY_CLASS = [name for name, one in RECIPES.items() if one.config]


def written(recipe: Recipe, folder: Path) -> Path:
    (folder / recipe.file).write_text(recipe.text)
    return folder / recipe.file


def imported(recipe: Recipe, folder: Path) -> RunSpec:
    """The run of a recipe, as the command writes it into a run.toml."""
    found = shardwise.import_(written(recipe, folder), cluster=recipe.cluster,
                              model=None if "model" in recipe.text else "llama-3-8b")  # fmt: skip
    assert found.run is not None, found.missing
    (folder / "run.toml").write_text(found.toml)
    return read_run(folder / "run.toml").resolved()


def test_there_are_thirty() -> None:
    assert len(RECIPES) >= 30


@pytest.mark.parametrize("name", BY_TABLE)
def test_export_after_import_changes_nothing(name: str, tmp_path: Path) -> None:
    """Key by key of the user's own file: none has to be edited."""
    recipe = RECIPES[name]
    run = imported(recipe, tmp_path)
    exported = export_run(run, recipe.stack)
    if exported.name.endswith(".py"):
        pytest.skip("with adapters the Trainer's arguments are part of a script")
    changes = edits_of(run, exported, recipe.stack, tmp_path / recipe.file)
    assert [one.words for one in changes] == []


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in BY_TABLE])
def test_torchtitan_comes_back_equal(name: str, tmp_path: Path) -> None:
    run = imported(RECIPES[name], tmp_path)
    exported = export_run(run, "torchtitan")
    (tmp_path / exported.name).write_text(exported.text)
    back = shardwise.import_(tmp_path / exported.name, cluster=RECIPES[name].cluster).run
    assert back is not None
    again = back.resolved()
    differing = {field for field in type(run.strategy).model_fields
                 if getattr(run.strategy, field) != getattr(again.strategy, field)}  # fmt: skip
    assert differing <= {field for one in exported.differences for field in one.fields}
    assert (again.job, again.train) == (run.job, run.train)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("trl yaml", {"micro_batch": 4, "accumulate": 4},
         ["~ per_device_train_batch_size: 2 -> 4", "~ gradient_accumulation_steps: 8 -> 4"]),
        ("sft, lora", {"recompute": "none"}, ["+ gradient_checkpointing: false"]),
        ("axolotl ddp", {"recompute": "none"}, ["~ gradient_checkpointing: true -> false"]),
        ("factory full", {"kind": "zero2", "reshard_after_forward": None},
         ["~ fsdp_config.reshard_after_forward: true -> false"]),
        ("accelerate zero2", {"kind": "zero3", "reshard_after_forward": None},
         ["~ fsdp_config.fsdp_reshard_after_forward: false -> true"]),
        ("deepspeed zero2", {"micro_batch": 2, "accumulate": 4},
         ["~ train_micro_batch_size_per_gpu: 4 -> 2", "~ gradient_accumulation_steps: 2 -> 4"]),
    ],
)  # fmt: skip
def test_a_change_is_an_edit_of_that_key_alone(
    name: str, changes: dict[str, Any], expected: list[str], tmp_path: Path
) -> None:
    recipe = RECIPES[name]
    run = imported(recipe, tmp_path)
    run = run._replace(strategy=run.strategy.but(**changes)).resolved()
    exported = export_run(run, recipe.stack)
    found = edits_of(run, exported, recipe.stack, tmp_path / recipe.file)
    assert sorted(one.words for one in found) == sorted(expected)


def test_a_script_is_told_what_to_change_about_its_model(tmp_path: Path) -> None:
    """Loaded by its name, TRL's model is in fp32 unless model_init_kwargs says otherwise."""
    script = (ROOT / "examples" / "stacks" / "trl_lora.py").read_text()
    recipe = Recipe("trl", "train.py", script, {}, cluster="1xA100-40GB")
    run = imported(recipe, tmp_path)
    assert run.adapter is not None
    assert run.adapter.base == "fp32"

    def edits(**changes: object) -> list[str]:
        adapter = run.model.adapter
        assert adapter is not None
        changed = run._replace(model=run.model.but(adapter=adapter.but(**changes)))
        exported = export_run(changed, "trl")
        return [one.words for one in edits_of(changed, exported, "trl", tmp_path / recipe.file)]

    assert edits() == []
    assert edits(base="bf16") == ["+ model_init_kwargs.dtype: bfloat16"]
    assert edits(rank=64) == ["~ LoraConfig.r: 16 -> 64"]
    assert "+ BitsAndBytesConfig.load_in_4bit: true" in edits(base="nf4")
    # And the edit is read back.
    told = script.replace("bf16=True,", 'bf16=True, model_init_kwargs={"dtype": "bfloat16"},')
    again = imported(recipe._replace(text=told), tmp_path)
    assert again.adapter is not None
    assert again.adapter.base == "bf16"


def test_the_command_lists_edits(tmp_path: Path) -> None:
    recipe = RECIPES["trl yaml"]
    imported(recipe, tmp_path)
    words = ("export", "run.toml", "--to", "trl", "--against", recipe.file)
    assert command(*words, folder=tmp_path).stdout == f"{recipe.file} needs no edit.\n"
    text = (tmp_path / "run.toml").read_text()
    (tmp_path / "run.toml").write_text(text.replace("accumulate = 8", "accumulate = 16"))
    printed = command(*words, folder=tmp_path).stdout
    assert printed == f"Edit {recipe.file}:\n  ~ gradient_accumulation_steps: 8 -> 16\n"
    found = json.loads(command(*words, "--json", folder=tmp_path).stdout)["edits"]
    assert found == [{"key": "gradient_accumulation_steps", "old": 8, "new": 16}]
    refused = command("export", "run.toml", "--to", "axolotl", "--against", recipe.file,
                      folder=tmp_path)  # fmt: skip
    assert refused.returncode == 2
    assert "against" in refused.stderr


def test_a_plan_for_a_stack_keeps_the_tokens_per_step(tmp_path: Path) -> None:
    run = imported(RECIPES["sft, lora"], tmp_path)
    plan = shardwise.plan(run=run, for_stack="trl")
    assert plan.winner is not None
    tokens = run.job.tokens_per_step(run.strategy)
    assert plan.problem.job.tokens_per_step(plan.winner.strategy) == tokens


# ---- what the installed package makes of the same file ------------------------------------

SCHEDULES = {"linear": "linear", "cosine": "cosine", "constant": "constant",
             "constant_with_warmup": "constant", "cosine_with_min_lr": "cosine"}  # fmt: skip
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw",
              "adamw_torch_8bit": "adamw-8bit"}  # fmt: skip
NUMBERS = {"learning_rate": "learning_rate", "weight_decay": "weight_decay",
           "max_grad_norm": "clip_norm", "adam_beta1": "beta1", "adam_beta2": "beta2",
           "adam_epsilon": "epsilon", "seed": "seed"}  # fmt: skip


def settings(recipe: Recipe, folder: Path) -> dict[str, Any]:
    """The settings of an import, by the names of the Trainer's arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = import_file(written(recipe, folder))
    train, strategy = found.train, found.strategy
    pair = 2 if found.job.get("method") == "dpo" else 1
    return {
        **{theirs: train[ours] for theirs, ours in NUMBERS.items()},
        "lr_scheduler_type": train["schedule"],
        "optim": found.job["optimizer"],
        "max_steps": train.get("steps", -1),
        "num_train_epochs": train.get("epochs"),
        "warmup_steps": train.get("warmup_steps", 0),
        "per_device_train_batch_size": strategy["micro_batch"] / pair,  # type: ignore[operator]
        "gradient_accumulation_steps": strategy["accumulate"],
        "recomputes": strategy.get("recompute", "none") == "full",
        "max_length": found.job.get("seq_len"),
        "packing": found.data.get("packing", False),
    }


def of_arguments(arguments: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """The same settings in what transformers or TRL made of the file."""
    fsdp = arguments.get("fsdp_config") or {}
    recomputes = arguments["gradient_checkpointing"] or fsdp.get("activation_checkpointing", False)
    return {
        **{name: arguments[name] for name in NUMBERS},
        "lr_scheduler_type": SCHEDULES[arguments["lr_scheduler_type"]],
        "optim": OPTIMIZERS[arguments["optim"]],
        "max_steps": arguments["max_steps"],
        # Steps take precedence.
        "num_train_epochs": None if arguments["max_steps"] > 0 else arguments["num_train_epochs"],
        "warmup_steps": arguments["warmup_steps"],
        "per_device_train_batch_size": arguments["per_device_train_batch_size"],
        "gradient_accumulation_steps": arguments["gradient_accumulation_steps"],
        "recomputes": bool(recomputes),
        "max_length": arguments.get("max_length", ours["max_length"]),
        "packing": arguments.get("packing", False),
    }


ASK = """
import json, sys, warnings
warnings.simplefilter("ignore")
import {library} as library
answers = {{}}
for name, (config, table) in json.load(open(sys.argv[1])).items():
    table = {{**table, "use_cpu": True, "bf16": False, "report_to": "none", "output_dir": "out"}}
    table.pop("torch_compile", None)
    kind = getattr(library, config)
    known = {{field.name for field in __import__("dataclasses").fields(kind)}}
    made = kind(**{{key: value for key, value in table.items() if key in known}})
    answers[name] = {{key: getattr(value, "value", value) for key, value in vars(made).items()
                     if isinstance(getattr(value, "value", value), (int, float, str, dict))}}
print("ANSWER " + json.dumps(answers, default=str))
"""


def ask(code: str, folder: Path, *arguments: str, where: tuple[Path, ...] = ()) -> Any:
    """The answer of a program of the package's own; skipped where a package is absent."""
    path = os.pathsep.join([*map(str, where), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=folder, text=True, check=False,
        env={**os.environ, "PYTHONPATH": path, "DISABLE_VERSION_CHECK": "1",
             "ACCELERATE_USE_CPU": "true"}, capture_output=True,
    )  # fmt: skip
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-2000:]
    line = next(one for one in done.stdout.splitlines() if one.startswith("ANSWER "))
    return json.loads(line.removeprefix("ANSWER "))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("library", "configs"),
    [("transformers", ("TrainingArguments",)), ("trl", ("SFTConfig", "DPOConfig"))],
)
def test_settings_are_those_of_the_package(
    library: str, configs: tuple[str, ...], tmp_path: Path
) -> None:
    asked = {name: (RECIPES[name].config, RECIPES[name].table) for name in BY_CLASS
             if RECIPES[name].config in configs}  # fmt: skip
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    answers = ask(ASK.format(library=library), tmp_path, "asked.json")
    for name, answer in answers.items():
        ours = settings(RECIPES[name], tmp_path)
        assert ours == of_arguments(answer, ours), name


ACCELERATE = """
import json, sys
from accelerate.commands.config import load_config_from_file
from accelerate.utils import FullyShardedDataParallelPlugin
answers = {}
for name in sys.argv[1:]:
    made = load_config_from_file(name)
    answers[name] = {key: getattr(value, "value", value) for key, value in vars(made).items()}
print("ANSWER " + json.dumps(answers, default=str))
"""


@pytest.mark.nightly
def test_accelerate_reads_the_same(tmp_path: Path) -> None:
    recipes = {one.file: one for one in RECIPES.values() if one.stack == "accelerate"}
    for one in recipes.values():
        written(one, tmp_path)
    for file, theirs in ask(ACCELERATE, tmp_path, *recipes).items():
        found = import_file(tmp_path / file)
        sharded = theirs["distributed_type"] == "FSDP"
        keeps = theirs["fsdp_config"].get("fsdp_reshard_after_forward") is False
        assert found.strategy["kind"] == ("ddp" if not sharded else "zero2" if keeps else "zero3")
        assert found.strategy["param_dtype"] == theirs["mixed_precision"]
        assert (found.processes, found.machines) == (theirs["num_processes"],
                                                     theirs["num_machines"])  # fmt: skip
        recomputes = theirs["fsdp_config"].get("fsdp_activation_checkpointing", False)
        assert (found.strategy.get("recompute", "none") == "full") is recomputes


DEEPSPEED = """
import json, sys
from deepspeed.runtime.config import DeepSpeedConfig
class Ranks:
    world_size = 8
answers = {}
for name in sys.argv[1:]:
    made = DeepSpeedConfig(json.load(open(name)), mesh_device=None)
    if made.gradient_accumulation_steps is None:
        made.gradient_accumulation_steps = 1
    answers[name] = [made.zero_config.stage, made.train_micro_batch_size_per_gpu,
                     made.gradient_clipping]
print("ANSWER " + json.dumps(answers, default=str))
"""


@pytest.mark.nightly
def test_deepspeed_reads_the_same(tmp_path: Path) -> None:
    recipes = {one.file: one for one in RECIPES.values() if one.stack == "deepspeed"}
    for one in recipes.values():
        written(one, tmp_path)
    for file, (stage, micro_batch, clip) in ask(DEEPSPEED, tmp_path, *recipes).items():
        found = import_file(tmp_path / file)
        assert found.strategy["kind"] == f"zero{int(stage)}"
        assert found.strategy["micro_batch"] == micro_batch
        # Without an optimizer in the file, the run's own default holds.
        assert TrainSettings.read(found.train).clip_norm == clip


AXOLOTL = """
import json, sys, warnings
warnings.simplefilter("ignore")
from axolotl.utils.schemas.config import AxolotlInputConfig
answers = {}
for name, table in json.load(open(sys.argv[1])).items():
    made = AxolotlInputConfig(**table)
    answers[name] = {key: getattr(value, "value", value) for key, value in vars(made).items()}
print("ANSWER " + json.dumps(answers, default=str))
"""
# Where axolotl leaves a key to transformers it is None.
OF_AXOLOTL = {"micro_batch_size": "per_device_train_batch_size", "num_epochs": "num_train_epochs",
              "sequence_len": "max_length", "lr_scheduler": "lr_scheduler_type",
              "optimizer": "optim", "sample_packing": "packing",
              "gradient_accumulation_steps": "gradient_accumulation_steps",
              "max_steps": "max_steps", **dict.fromkeys(NUMBERS)}  # fmt: skip


@pytest.mark.nightly
def test_axolotl_reads_the_same(tmp_path: Path) -> None:
    asked = {name: one.table for name, one in RECIPES.items() if one.stack == "axolotl"}
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    for name, theirs in ask(AXOLOTL, tmp_path, "asked.json").items():
        ours = settings(RECIPES[name], tmp_path)
        named = {**SCHEDULES, **OPTIMIZERS}
        for key, ourname in OF_AXOLOTL.items():
            value = theirs.get(key)
            counted = key != "num_epochs" or ours["max_steps"] < 0
            if value is not None and counted:
                assert ours[ourname or key] == named.get(str(value), value), (name, key)


LLAMA_FACTORY = """
import json, sys, warnings
warnings.simplefilter("ignore")
from transformers import HfArgumentParser
from llamafactory.hparams import (
    DataArguments, FinetuningArguments, GeneratingArguments, ModelArguments, TrainingArguments)
kinds = (ModelArguments, DataArguments, TrainingArguments, FinetuningArguments, GeneratingArguments)
answers = {}
for name, table in json.load(open(sys.argv[1])).items():
    on_cpu = {**table, "use_cpu": True, "bf16": False, "report_to": "none"}
    model, data, train, tune, _ = HfArgumentParser(kinds).parse_dict(on_cpu)
    simple = {key: getattr(value, "value", value) for key, value in vars(train).items()}
    simple |= {"cutoff_len": data.cutoff_len, "packs": bool(data.packing), "stage": tune.stage,
               "disabled": model.disable_gradient_checkpointing}
    answers[name] = {key: value for key, value in simple.items()
                     if isinstance(value, (int, float, str))}
print("ANSWER " + json.dumps(answers, default=str))
"""


@pytest.mark.nightly
def test_llama_factory_reads_the_same(tmp_path: Path) -> None:
    asked = {name: one.table for name, one in RECIPES.items() if one.stack == "llama-factory"}
    (tmp_path / "asked.json").write_text(json.dumps(asked))
    for name, theirs in ask(LLAMA_FACTORY, tmp_path, "asked.json").items():
        ours = settings(RECIPES[name], tmp_path)
        theirs |= {"gradient_checkpointing": not theirs["disabled"], "max_length": 2048,
                   # It packs in its stage pt, when it loads the data.
                   "packing": theirs["packs"] or theirs["stage"] == "pt"}  # fmt: skip
        assert ours == of_arguments(theirs, ours), name
        # It keeps one token of packed sequences for padding.
        assert theirs["cutoff_len"] in (ours["max_length"], ours["max_length"] - 1)
