"""A run exported to another stack: the file, the command, and what differs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict

from shardwise.spec.strategy import Strategy
from shardwise.stacks.outcomes import Difference


class Target(NamedTuple):
    """The name of the exported file, and requests to a scheduler other than devices."""

    # The name of the file in commands; None is the stack's usual name.
    file: str | None = None
    # The run.toml that scheduler jobs train.
    run_file: str = "run.toml"
    # Slurm's --partition and --account; the time limit of Slurm and Kubernetes.
    partition: str | None = None
    account: str | None = None
    time: str | None = None
    # Variables of the environment, by name.
    environment: Mapping[str, str] = {}
    # Commands that a Slurm script runs before it starts launchers.
    setup: tuple[str, ...] = ()
    # The number of spare nodes, which replace nodes that are lost.
    spares: int = 0
    # The image of Kubernetes' containers.
    image: str | None = None

    def name(self, usual: str) -> str:
        """The file's name, or `usual` if none is set, quoted for a shell command."""
        return shlex.quote(self.file or usual)


class TargetSettings(TypedDict, total=False):
    """The fields of Target as keyword arguments."""

    file: str | None
    run_file: str
    partition: str | None
    account: str | None
    time: str | None
    environment: Mapping[str, str]
    setup: tuple[str, ...]
    spares: int
    image: str | None


# The stack's usual file name, and no requests to a scheduler.
DEFAULT_TARGET = Target()


Setting = Literal["job.optimizer", "adapter"]


class Exported(NamedTuple):
    """The file of a run for another stack, and how that stack runs it."""

    # The usual name of the file, such as accelerate.yaml.
    name: str
    text: str
    # Settings of the run that this stack cannot express, and what it does instead.
    differences: tuple[Difference, ...]
    # The command that starts the run from the written file.
    command: str
    # The strategy as this stack runs it.
    applied: Strategy
    # Settings that belong in the user's script, not in this file.
    by_script: tuple[Difference, ...] = ()
    # Settings outside the strategy that the stack changes.
    changed: tuple[Setting, ...] = ()

    @property
    def unsupported(self) -> tuple[str, ...]:
        """One sentence for each setting that the stack cannot express."""
        return tuple(one.words for one in self.differences)

    @property
    def in_script(self) -> tuple[str, ...]:
        """One sentence for each setting that belongs in the user's script."""
        return tuple(one.words for one in self.by_script)

    def write(self, path: str | Path) -> None:
        """Write the file to `path`."""
        Path(path).write_text(self.text, encoding="utf-8")

    def __repr__(self) -> str:
        left = f"{len(self.differences)} not expressible, {len(self.by_script)} for your script"
        return f"Exported({self.name!r}, {len(self.text):,} characters, {left})"

    def to_dict(self) -> dict[str, Any]:
        """The export as JSON values, as `--json` prints it."""
        return {
            **self._asdict(),
            "unsupported": self.unsupported,
            "in_script": self.in_script,
            "applied": self.applied.model_dump(mode="json"),
            "differences": [one.to_dict() for one in self.differences],
            "by_script": [one.to_dict() for one in self.by_script],
        }
