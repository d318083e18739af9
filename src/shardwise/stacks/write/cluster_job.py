"""Parts that the jobs of all schedulers share: names, folders and environment variables."""

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
    """Variables of torch and NCCL; none without GPUs."""
    if run.cluster.device.is_cpu:
        return ()
    return (
        Variable("NCCL_DEBUG", "WARN", "NCCL prints warnings only."),
        Variable(
            "PYTORCH_ALLOC_CONF",
            "expandable_segments:True",
            "Less fragmentation: the allocator grows segments instead of adding new ones.",
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
    """Whether the run saves checkpoints, which is the default."""
    return run.train is None or run.train.checkpoint.save


def saves_far_away(run: RunSpec) -> bool:
    """Whether checkpoints go to an object store."""
    return run.train is not None and "://" in (run.train.checkpoint.to or "")
