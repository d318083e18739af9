"""The recipe of an imported run is that of its stack: what a file does not set has its defaults."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from shardwise.stacks.deepspeed.table import READ
from shardwise.stacks.read import axolotl, torch_script, trainer
from shardwise.stacks.read.imports import import_file
from shardwise.stacks.table import Table, defaults_of, with_changed_rows
from shardwise.stacks.training_arguments import (
    AXOLOTL_BATCH,
    AXOLOTL_TRAIN,
    BATCH,
    DPO,
    METHODS,
    SCHEDULE,
    SFT,
    TRAIN,
)
from shardwise.stacks.write.exports import export_run
from tests.stacks.runs import large

# Each file holds a batch and a learning rate alone.
SCRIPT = "from trl import SFTConfig\nSFTConfig(per_device_train_batch_size=2{more})\n"


def defaults_of_class(config: Any) -> dict[str, Any]:
    return {field.name: field.default for field in dataclasses.fields(config)}


def check_defaults(rows: Table, theirs: dict[str, Any]) -> None:
    ours = defaults_of(rows)
    assert ours == {key: theirs[key] for key in ours}


def test_defaults_are_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    theirs = defaults_of_class(transformers.TrainingArguments)
    check_defaults((*BATCH, *METHODS, *TRAIN, SCHEDULE), theirs)


def test_defaults_are_those_of_trl() -> None:
    trl = pytest.importorskip("trl", reason="needs trl")
    theirs = defaults_of_class(trl.SFTConfig)
    check_defaults((*BATCH, *with_changed_rows(TRAIN, SFT), SCHEDULE), theirs)
    assert trainer.TRL_DEFAULTS["max_length"] == theirs["max_length"]
    of_dpo = defaults_of_class(trl.DPOConfig)
    check_defaults((*BATCH, *with_changed_rows(TRAIN, DPO), SCHEDULE), of_dpo)
    assert trainer.TRL_DEFAULTS["max_length"] == of_dpo["max_length"]


def test_defaults_are_those_of_axolotl() -> None:
    training = pytest.importorskip("axolotl.utils.schemas.training", reason="needs axolotl")
    fields = training.HyperparametersConfig.model_fields
    # What it leaves to transformers is None here.
    theirs = {name: field.default for name, field in fields.items() if field.default is not None}
    rows = (*AXOLOTL_BATCH, *AXOLOTL_TRAIN)
    ours = {key: value for key, value in defaults_of(rows).items() if key in theirs}
    assert ours == {key: theirs[key] for key in ours}


def test_defaults_are_those_of_deepspeed() -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config", reason="needs deepspeed")
    constants = pytest.importorskip("deepspeed.runtime.constants")
    assert defaults_of(READ) == {
        "zero_optimization.stage": config.DeepSpeedZeroConfig.model_fields["stage"].default,
        "gradient_clipping": constants.GRADIENT_CLIPPING_DEFAULT,
    }


def test_what_only_a_running_script_knows_has_no_default() -> None:
    """Three states: given, absent and undecided."""
    given = torch_script.read(SCRIPT.format(more=", learning_rate=3e-4"))
    assert given.train["learning_rate"] == 3e-4
    absent = torch_script.read(SCRIPT.format(more=""))
    assert absent.train["learning_rate"] == 2e-5
    assert [one.kind for one in absent.outcomes if one.key == "learning_rate"] == ["default"]
    undecided = torch_script.read(SCRIPT.format(more=", learning_rate=rate()"))
    assert "learning_rate" not in undecided.train
    # A dictionary may hold whatever is not written out.
    unknown = torch_script.read(SCRIPT.format(more=", **settings()"))
    assert unknown.train == {}


def test_values_elsewhere_in_a_file_are_no_defaults() -> None:
    nested = {
        "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.2}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}},
    }
    found = trainer.read({"per_device_train_batch_size": 1, "deepspeed": nested})
    assert found.train["learning_rate"] == 1e-3
    assert found.train["weight_decay"] == 0.2
    assert found.train["schedule"] == "constant"
    assert found.train["beta2"] == 0.999


@pytest.mark.parametrize(
    ("steps", "more", "warmup"),
    [(1000, {}, 30), (10_000, {}, 100), (40, {}, 2), (1000, {"warmup_steps": 7}, 7),
     (1000, {"warmup_ratio": 0.1}, None)],
)  # fmt: skip
def test_axolotl_warms_up_without_being_asked(
    steps: int, more: dict[str, object], warmup: int | None
) -> None:
    table = {"base_model": "m", "micro_batch_size": 1, "learning_rate": 1e-4, "max_steps": steps}
    assert axolotl.read({**table, **more}).train.get("warmup_steps") == warmup


@pytest.mark.parametrize("stack", ["trainer", "trl", "axolotl", "llama-factory", "deepspeed"])
@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_schedules_come_back(stack: str, schedule: str, tmp_path: Path) -> None:
    pytest.importorskip("yaml")
    for final in (0.0, 0.3):
        run = large(train={"steps": 50, "schedule": schedule, "final_learning_rate": final})
        written = export_run(run, stack)
        (tmp_path / written.name).write_text(written.text)
        back = import_file(tmp_path / written.name)
        assert back.train["schedule"] == schedule
        # A line ends at 0 in all of them.
        lost = schedule == "linear" and final > 0
        if schedule != "constant":
            assert back.train["final_learning_rate"] == (0.0 if lost else final)
        named = {name for one in written.differences for name in one.fields}
        assert ("train.final_learning_rate" in named) == lost
