"""Every stack that a run can be written for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from shardwise.spec.record import SpecError, did_you_mean
from shardwise.spec.run import RunSpec
from shardwise.stacks.write.exported import Exported

# Each is the function `export` in the module of its name.
STACKS = ("accelerate", "torchtitan", "deepspeed", "lightning", "python", "slurm", "kubernetes")


def export_run(run: RunSpec, stack: str) -> Exported:
    """Write a run, its strategy resolved, for another stack."""
    if stack not in STACKS:
        raise SpecError(
            f"to: {stack[:40]!r} is not one of {', '.join(STACKS)}{did_you_mean(stack, STACKS)}"
        )
    export: Callable[[RunSpec], Exported] = import_module(f"shardwise.stacks.write.{stack}").export
    return export(run)
