"""What the jobs of all schedulers share: one launcher on each node, and its environment."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import NamedTuple

from shardwise.spec.run import RunSpec
from shardwise.stacks.write.quoting import slug


class Variable(NamedTuple):
    """A variable of the environment, and why it is set."""

    name: str
    value: str
    why: str


def gpu_variables(run: RunSpec) -> tuple[Variable, ...]:
    """Of torch and NCCL; none where there are no GPUs."""
    if run.cluster.device.is_cpu:
        return ()
    return (
        Variable("NCCL_DEBUG", "WARN", "NCCL tells what goes wrong, and nothing else."),
        Variable(
            "PYTORCH_ALLOC_CONF",
            "expandable_segments:True",
            "The allocator grows its blocks instead of leaving gaps between them.",
        ),
    )


def job_name(run: RunSpec) -> str:
    return slug(f"{run.model.name.rpartition('/')[2]}-{run.strategy.kind}")


def local_files(run: RunSpec) -> dict[str, str]:
    """The settings that name files of the machine the run.toml was written on."""
    data = run.data
    found: dict[str, str] = {}
    if config := getattr(run.model, "config", None):
        found["model.config"] = str(config)
    if data is not None and data.path:
        found["data.path"] = ", ".join(data.path)
    if data is not None and data.tokenizer != "bytes":
        found["data.tokenizer"] = data.tokenizer
    return found


def runs_folder(run: RunSpec) -> PurePosixPath:
    return PurePosixPath(run.train.folder if run.train else "runs")


def saves(run: RunSpec) -> bool:
    """Whether there is something to go on from; it is unless told otherwise."""
    return run.train is None or run.train.checkpoint.save


def saves_far_away(run: RunSpec) -> bool:
    """Whether checkpoints go to an object store."""
    return run.train is not None and "://" in (run.train.checkpoint.to or "")
