"""A run written as a file of another stack, and what that stack makes of it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from shardwise.spec.strategy import Strategy
from shardwise.stacks.outcomes import Difference


class Target(NamedTuple):
    """Where an export is written, and what a scheduler is asked for besides devices."""

    # The written file, as commands name it; None stands for the stack's usual name.
    file: str | None = None
    # The run.toml that jobs start.
    run_file: str = "run.toml"
    # Slurm's --partition and --account; the time limit of Slurm and Kubernetes.
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    # Variables of the environment, by name.
    environment: Mapping[str, str] = {}
    # Commands that a Slurm script runs before it starts launchers.
    setup: tuple[str, ...] = ()
    # Nodes that wait until one that trains is lost.
    spares: int = 0
    # The image of Kubernetes' containers.
    image: str | None = None

    def name(self, usual: str) -> str:
        """The file's name as a word of a shell command."""
        return shlex.quote(self.file or usual)


# The stack's usual name, and nothing special asked of a scheduler.
USUAL = Target()


Setting = Literal["job.optimizer", "adapter"]


class Exported(NamedTuple):
    """One file of another stack."""

    # Its usual name, such as accelerate.yaml.
    name: str
    text: str
    # Settings of the run that this stack cannot express, and what it does.
    differences: tuple[Difference, ...]
    # The command that starts the run from the written file.
    command: str
    # The strategy as this stack runs it.
    applied: Strategy
    # Settings that belong in the user's script, not in this file.
    by_script: tuple[Difference, ...] = ()
    # Settings of the run that the stack trains otherwise, beyond those of the strategy.
    changed: tuple[Setting, ...] = ()

    @property
    def unsupported(self) -> tuple[str, ...]:
        """One sentence for each setting that this stack cannot express."""
        return tuple(one.words for one in self.differences)

    @property
    def in_script(self) -> tuple[str, ...]:
        """One sentence for each setting that the user's script sets."""
        return tuple(one.words for one in self.by_script)

    def to_dict(self) -> dict[str, Any]:
        return {
            **self._asdict(),
            "unsupported": self.unsupported,
            "in_script": self.in_script,
            "applied": self.applied.model_dump(mode="json"),
            "differences": [one.to_dict() for one in self.differences],
            "by_script": [one.to_dict() for one in self.by_script],
        }
