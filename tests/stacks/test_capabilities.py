"""What a plan says that a stack trains with is what its exported file then says."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from shardwise.api import describe_run
from shardwise.spec.optimizer import OPTIMIZERS
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.train import TrainSettings
from shardwise.stacks.limits import StackLimits
from shardwise.stacks.read.imports import import_file
from shardwise.stacks.write.exports import STACKS, export_run
from tests.pairwise import pairwise

LOSSES = ("plain", "chunked")
ADAPTERS = (None, "lora:8", "qlora:8", "dora:8")
ALL = list(product(STACKS, OPTIMIZERS, LOSSES, ADAPTERS))
# Files that hold the optimizer and that can be read back.
READABLE = ("deepspeed", "axolotl", "torchtitan", "python", "llama-factory")


def run_of(optimizer: str, loss: str, adapter: str | None) -> RunSpec:
    described = describe_run(
        "llama-3.2-1b", "8xH100-SXM", optimizer=optimizer, loss=loss, adapter=adapter, planned=True
    )
    # Files hold an optimizer only with settings of training.
    return described._replace(train=TrainSettings(steps=10)).resolved()


def check(stack: str, optimizer: str, loss: str, adapter: str | None, folder: Path) -> None:
    run = run_of(optimizer, loss, adapter)
    try:
        limits = StackLimits(run, stack)
    except SpecError as refused:
        planned = str(refused)
    else:
        planned = ""
        assert limits.has_optimizer(run.job.optimizer)
    try:
        exported = export_run(run, stack)
    except SpecError as refused:
        # What cannot be exported is not planned, for the same reason, or not with this strategy.
        if planned or limits.trains(run.job.optimizer, run.strategy):
            assert planned == str(refused)
        return
    assert bool(planned) == ("job.optimizer" in exported.changed)
    if planned:
        return
    # The loss that a plan may choose is the one that the file then runs.
    assert (loss in limits.choices("loss", (loss,))) == (exported.applied.loss == loss)
    if stack in READABLE:
        file = folder / exported.name
        file.write_text(exported.text)
        back = import_file(file)
        assert back.job.get("optimizer", "adamw") == optimizer


FACTORS = {"stack": STACKS, "optimizer": OPTIMIZERS, "loss": LOSSES, "adapter": ADAPTERS}


@pairwise(FACTORS, lambda _: True, gate=24)
def test_plan_and_export_agree(case: dict[str, Any], tmp_path: Path) -> None:
    check(**case, folder=tmp_path)


@pytest.mark.nightly
@pytest.mark.parametrize("stack", STACKS)
def test_plan_and_export_agree_in_every_combination(stack: str, tmp_path: Path) -> None:
    for case in ALL:
        if case[0] == stack:
            check(*case, tmp_path)
