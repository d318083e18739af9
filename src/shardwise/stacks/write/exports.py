"""Export a run to any supported stack."""

from __future__ import annotations

import ast
from importlib import import_module
from typing import Any

from shardwise.spec.record import SpecError, did_you_mean
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.experts import balance_differences
from shardwise.stacks.outcomes import ABSENT, Difference
from shardwise.stacks.write.axes import check_axes
from shardwise.stacks.write.chat_differences import left_to_script
from shardwise.stacks.write.exported import DEFAULT_TARGET, Exported, Target
from shardwise.stacks.write.method import check_method
from shardwise.stacks.write.optimizers import check_strategy, optimizers_of

# Each stack is a module of this name (hyphens as underscores) with a function `export`. Stacks that
# cannot run every strategy also have `applied`, which returns the strategy as the stack runs it.
STACKS = (
    *("accelerate", "trainer", "deepspeed", "torchtitan", "megatron-bridge", "lightning"),
    *("python", "trl", "axolotl", "llama-factory", "slurm", "kubernetes"),
)
# Stacks that shard every tensor along dimension 0, which pads stacked experts. Others do not:
# torchtitan uses dimension 1 where there are fewer experts than devices, DeepSpeed divides
# flattened tensors, and the scripts for Lightning and plain torch do what Shardwise does.
_ALONG_ROWS = ("accelerate", "trainer", "trl", "axolotl", "llama-factory")
# Stacks with data read by the user's script; for the Trainer only without adapters.
_DATA_BY_SCRIPT = ("accelerate", "deepspeed", "trainer")
# Stacks with adapters created by the user's script, not by the exported file.
_BY_SCRIPT = ("accelerate", "deepspeed")
# Stacks that refuse an unsupported optimizer. Others write AdamW instead and report it.
_ONLY_KNOWN_OPTIMIZERS = ("lightning", "python", "slurm", "kubernetes")
# Stacks with files that start Shardwise itself, with its run.toml.
_RUNS_SHARDWISE = ("slurm", "kubernetes")
# Stacks that count epochs in the file, or leave them to the user's script.
_COUNTS_EPOCHS = ("trainer", "trl", "axolotl", "llama-factory", "accelerate", "deepspeed")
# Stacks with exported files that train every parameter.
_WITHOUT_ADAPTERS = ("torchtitan", "megatron-bridge", "lightning", "python")


def export_run(run: RunSpec, stack: str, target: Target = DEFAULT_TARGET) -> Exported:
    """Write a run with a resolved strategy as a file for `stack`.

    Raises:
        SpecError: The stack cannot train the run at all.
    """
    if run.adapter is not None and stack in _WITHOUT_ADAPTERS:
        raise SpecError(
            f"adapter: the file for {stack} trains every parameter; use trainer, trl, axolotl or "
            "llama-factory, or leave [adapter] out"
        )
    module = _module(stack)
    check_method(run, stack)
    check_axes(run, stack)
    trains = run.job.optimizer in optimizers_of(stack)
    if not trains and stack in _ONLY_KNOWN_OPTIMIZERS:
        raise SpecError(unknown_optimizer(run, stack))
    check_strategy(run, stack)
    exported: Exported = module.export(run, target)
    if not trains:
        exported = exported._replace(changed=(*exported.changed, "job.optimizer"))
    if run.eval is not None and stack not in _RUNS_SHARDWISE:
        lost = Difference("nothing is evaluated on held-out data", {"eval": ABSENT})
        exported = exported._replace(differences=(*exported.differences, lost))
    more = (*_epochs(run, stack), *balance_differences(run, stack))
    exported = exported._replace(differences=(*exported.differences, *more))
    if exported.name.endswith(".py"):
        _check_script(exported.text)
    if run.adapter is not None and stack in _BY_SCRIPT:
        why = "make it in your script, with get_peft_model of peft"
        adapter = Difference(why, {"adapter": run.adapter})
        exported = exported._replace(by_script=(*exported.by_script, adapter))
    by_script = stack in _DATA_BY_SCRIPT and (stack != "trainer" or run.adapter is None)
    if by_script:
        exported = exported._replace(by_script=(*exported.by_script, *left_to_script(run)))
    return exported


def _epochs(run: RunSpec, stack: str) -> tuple[Difference, ...]:
    """A difference if the run counts epochs, and the stack's file steps."""
    train = run.train
    if train is None or train.epochs is None or stack in _COUNTS_EPOCHS:
        return ()
    why = f"the file for {stack} counts steps; set train.steps, of which it has {train.steps:,}"
    return (Difference(why, {"train.epochs": train.epochs}),)


def unknown_optimizer(run: RunSpec, stack: str) -> str:
    """The error for an optimizer that a stack does not have, with those that it has."""
    known = " or ".join(optimizers_of(stack))
    return f"job.optimizer: {stack} does not train with {run.job.optimizer}; use {known}"


def applied_strategy(run: RunSpec, stack: str) -> Strategy:
    """The strategy of a run as a stack runs it; unchanged if the stack runs every strategy.

    Raises:
        SpecError: The stack lacks tensor or context parallelism that the strategy needs.
    """
    applied = getattr(_module(stack), "applied", None)
    check_axes(run, stack)
    return run.strategy if applied is None else applied(run)


def shards_along_rows(stack: str) -> bool:
    """Whether a stack shards every tensor along dimension 0, and so pads stacked experts."""
    return stack in _ALONG_ROWS


def _check_script(text: str) -> None:
    """Raise RuntimeError if a generated script is not valid Python."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError) as error:
        raise RuntimeError(
            f"the script is not valid Python, {error}; nothing was written"
        ) from None


def _module(stack: str) -> Any:
    """The module that writes files for a stack; SpecError if the stack is unknown."""
    if stack not in STACKS:
        raise SpecError(
            f"stack: {stack[:40]!r} is not one of {', '.join(STACKS)}{did_you_mean(stack, STACKS)}"
        )
    return import_module(f"shardwise.stacks.write.{stack.replace('-', '_')}")
