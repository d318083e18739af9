"""Check a run before training, from Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shardwise.spec.run import RunSpec
from shardwise.trainer.api import json_of_command, run_file
from shardwise.trials.doctor.check import Check

_MARKS = {True: "ok", False: "FAILED", None: "not run"}


@dataclass(frozen=True)
class Diagnosis:
    """The checks of a run, in the order in which they ran."""

    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed is not False for check in self.checks)

    def __repr__(self) -> str:
        lines = [f"  {_MARKS[c.passed]:<7} {c.name}: {c.detail}" for c in self.checks]
        return "\n".join([f"Diagnosis: {'passed' if self.passed else 'failed'}", *lines])


def doctor(run: str | Path | RunSpec, *, sharding: str | None = None) -> Diagnosis:
    """Check a run before training: a reduced model on a few CPU processes.

    Args:
        run: A run.toml or RunSpec.
        sharding: `package.module:function`, your own code that shards a mixture of experts. Then
            its gradients are compared with those of one process.

    Raises:
        SpecError: The run is invalid.
        CommandError: The checks could not be made; the error quotes the end of their log.

    Examples:
        >>> shardwise.doctor("run.toml").passed
    """
    with run_file(run) as file:
        result = json_of_command("doctor", file, ["--sharding", sharding] if sharding else [])
    return Diagnosis(tuple(Check(**check) for check in result["checks"]))
