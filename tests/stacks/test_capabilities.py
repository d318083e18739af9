"""What a plan says that a stack trains with is what its exported file then says."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shardwise.spec.optimizer import OPTIMIZERS
from shardwise.spec.question import describe_run
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import TrainSettings
from shardwise.stacks.limits import StackLimits, expresses
from shardwise.stacks.read.imports import import_file
from shardwise.stacks.write.differences import changed_fields
from shardwise.stacks.write.exported import Exported
from shardwise.stacks.write.exports import STACKS, export_run
from tests.pairwise import Chosen, covering

STATES = ("ddp", "zero1", "zero2", "zero3", "hsdp")
LOSSES = ("plain", "chunked")
ADAPTERS = (None, "lora:8", "qlora:8", "dora:8")
AXES: tuple[dict[str, Any], ...] = (
    {},
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": False},
    {"context": 2, "context_method": "ring"},
    {"context": 2, "context_method": "ulysses"},
    {"expert": 2},
)
FACTORS = {"optimizer": OPTIMIZERS, "state": STATES, "loss": LOSSES, "adapter": ADAPTERS,
           "axis": AXES}  # fmt: skip
# Files that hold the optimizer and that can be read back.
READABLE = ("deepspeed", "axolotl", "torchtitan", "python", "llama-factory")
# Their differences are sentences alone.
WITHOUT_FIELDS = ("python", "lightning")


def possible(case: Chosen) -> bool:
    """Divided matrices divide the loss by vocabulary; sequences and experts need sharded states."""
    axis = case.get("axis", {})
    if "tensor" in axis and case.get("loss") == "chunked":
        return False
    return not ({"context", "expert"} & set(axis) and case.get("state") == "ddp")


def run_of(
    optimizer: str, state: str, loss: str, adapter: str | None, axis: dict[str, Any]
) -> RunSpec:
    described = describe_run(
        "llama-3.2-1b", "2x4xH100-SXM@400Gbps", optimizer=optimizer, adapter=adapter, planned=True
    )
    strategy = Strategy.read({"kind": state, "loss": loss, **axis})
    # Files hold an optimizer only with settings of training.
    return described._replace(strategy=strategy, train=TrainSettings(steps=10)).resolved()


def check(stack: str, run: RunSpec, folder: Path) -> None:
    limits, planned = None, ""
    try:
        limits = StackLimits(run, stack)
    except SpecError as refused:
        planned = str(refused)
    try:
        exported = export_run(run, stack)
    except SpecError as refused:
        # What cannot be exported is not planned, for the same reason, or not with this strategy.
        if limits is None:
            assert planned == str(refused)
        else:
            runs = limits.trains(run.job.optimizer, run.strategy)
            assert not (runs and limits.allowed(run.strategy))
        assert not expresses(run, stack, "adapter") or limits is not None
        return
    changed = changed_fields(run.strategy, exported.applied)
    check_differences(stack, exported, set(changed))
    assert (limits is None) == ("job.optimizer" in exported.changed)
    assert expresses(run, stack, "adapter") == ("adapter" not in exported.changed)
    if limits is None:
        return
    assert limits.has_optimizer(run.job.optimizer)
    assert limits.trains(run.job.optimizer, run.strategy)
    assert limits.allowed(run.strategy) == (not changed)
    # The loss that a plan may choose is the one that the file then runs.
    loss = run.strategy.loss
    assert (loss in limits.choices("loss", (loss,))) == ("loss" not in changed)
    if stack in READABLE:
        file = folder / exported.name
        file.write_text(exported.text)
        assert import_file(file).job.get("optimizer", "adamw") == run.job.optimizer


def check_differences(stack: str, exported: Exported, changed: set[str]) -> None:
    """The records name exactly the settings that the stack runs otherwise."""
    if stack in WITHOUT_FIELDS:
        return
    named = {name for one in exported.differences for name in one.fields}
    assert named & set(Strategy.model_fields) == changed
    settings = {"job.optimizer"} if "job.optimizer" in named else set[str]()
    settings |= {"adapter"} if any(name.partition(".")[0] == "adapter" for name in named) else set()
    assert settings == set(exported.changed)


@pytest.mark.parametrize("stack", STACKS)
def test_plan_and_export_agree(stack: str, tmp_path: Path) -> None:
    """With every pair of optimizer, state, loss, adapter and axis."""
    for case in covering(FACTORS, possible):
        check(stack, run_of(**case), tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("stack", STACKS)
def test_plan_and_export_agree_in_every_combination(stack: str, tmp_path: Path) -> None:
    for values in product(*FACTORS.values()):
        case: Chosen = dict(zip(FACTORS, values, strict=True))
        if possible(case):
            check(stack, run_of(**case), tmp_path)
