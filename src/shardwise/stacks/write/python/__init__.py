"""Write a run as a training script that depends on torch only.

The script is plain `fully_shard` or DDP code with its settings at the top. It contains only the
code that the run needs. Its losses equal those of `shardwise train` bit by bit. A model that the
program does not contain is built by transformers or by the user's code.
"""

from __future__ import annotations

from shardwise.spec.run import RunSpec, check_loss
from shardwise.spec.strategy import Strategy
from shardwise.stacks.outcomes import Difference
from shardwise.stacks.write.axes import as_stack_runs
from shardwise.stacks.write.exported import DEFAULT_TARGET, Exported, Target
from shardwise.stacks.write.python.choices import choices_of, own_imports
from shardwise.stacks.write.python.data import data_constants
from shardwise.stacks.write.python.model import builder_of, model_constants
from shardwise.stacks.write.python.script import Settings, write_script
from shardwise.stacks.write.python.settings import constants_of, plain_name, train_of
from shardwise.stacks.write.python.unsupported import loses_compression, unsupported_by_script
from shardwise.stacks.write.torchrun import script_command

NAME = "train.py"


def export(run: RunSpec, target: Target = DEFAULT_TARGET) -> Exported:
    """The script of a run with a resolved strategy."""
    check_loss(run)
    given, run = run, run._replace(strategy=applied(run))
    command = script_command(run, target.name(NAME))
    text = write_script(_description(run, command), "train", settings_of(run))
    differences = tuple(map(Difference, unsupported_by_script(given)))
    return Exported(NAME, text, differences, command, run.strategy)


def settings_of(run: RunSpec) -> Settings:
    """The constants, choices and imports that a run sets in the program."""
    constants = constants_of(run, model_constants(run), data_constants(run))
    return Settings(constants, choices_of(run), own_imports(run))


def applied(run: RunSpec) -> Strategy:
    """The strategy as the script runs it."""
    return as_stack_runs(in_script(run), "python")


def in_script(run: RunSpec) -> Strategy:
    """The strategy without what no script has, such as a split root; a fused loss is in chunks.

    On CPUs it has no compression either, but that of fp16.
    """
    strategy = run.strategy
    lost = {"split_root": False, "attention": None, "expert": 1}
    loss = "chunked" if strategy.loss == "fused" else strategy.loss
    compress = None if loses_compression(run) else strategy.compress
    return strategy.but(**lost, loss=loss, compress=compress)


def _description(run: RunSpec, command: str) -> str:
    """The docstring of the script."""
    strategy = run.strategy
    how = {"single": "on one device", "ddp": "with DistributedDataParallel"}
    ways = how.get(strategy.kind, f"with fully_shard ({strategy})")
    needs = "torch >= 2.13"
    if builder_of(run) == "transformers":
        needs += " and transformers"
    if train_of(run).checkpoint.save and strategy.kind != "single":
        needs += "; torch itself needs NumPy to save"
    origin = "Written by `shardwise export`; it trains as `shardwise train` does."
    return f"Train {plain_name(run)} {ways}.\n\n    {command}\n\nNeeds {needs}.\n{origin}"
