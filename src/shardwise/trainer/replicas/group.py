"""The replica group of this launch, and checks of runs whose replicate axis torchft manages.

Each group is a separate launch, whose processes share one copy of the model states. This module
needs no torch: a run that cannot work is refused before processes are launched.
"""

from __future__ import annotations

import importlib.util
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec, run_table
from shardwise.spec.train import RestartSettings, TrainSettings

REPLICA = "SHARDWISE_REPLICA"
_OPTIMIZERS = ("adamw", "adam", "sgd", "momentum")
# Settings of [train] that may differ between the groups of a run.
_OWN_SETTINGS = (
    *("checkpoint", "device", "folder", "log_every", "measure", "metrics"),
    *("profile", "restart", "threads", "trackers"),
)


class ReplicaGroup(NamedTuple):
    """The number of this launch's replica group, from 0, and the total number of groups."""

    number: int
    total: int


def is_managed(run: RunSpec) -> bool:
    """Whether torchft manages the replicate axis of this run."""
    return run.train is not None and run.train.restart.engine == "torchft"


def replica_group(run: RunSpec, environment: Mapping[str, str] = os.environ) -> ReplicaGroup | None:
    """The replica group of this launch, from SHARDWISE_REPLICA; None for a run without torchft.

    Raises:
        SpecError: The run cannot be trained in replica groups.
    """
    if not is_managed(run):
        return None
    problems = list(_problems(run))
    count = run.strategy.replicate or 1
    text = environment.get(REPLICA, "")
    if not problems and not (text.isdigit() and int(text) < count):
        problems.append(
            f"{REPLICA}: {text!r} is not the number of a replica group; set it to 0 up to "
            f"{count - 1} in the launch of each group"
        )
    if problems:
        raise SpecError(problems)
    return ReplicaGroup(int(text), count)


def hang_limits(settings: RestartSettings) -> RestartSettings:
    """Settings whose hang limits, in seconds, leave a rank time to wait for another group.

    Without torchft, `settings` as they are.
    """
    if settings.engine != "torchft":
        return settings
    patience = settings.replica_timeout_s
    return settings.but(
        named_after_s=max(settings.named_after_s, patience),
        killed_after_s=max(settings.killed_after_s, 2 * patience),
    )


def one_group(run: RunSpec) -> RunSpec:
    """The run of one replica group: `replicate` is 1, and the global batch is its share.

    Without torchft, the run as it is.
    """
    if not is_managed(run):
        return run
    count, job = run.strategy.replicate or 1, run.job
    if job.global_batch is not None:
        if job.global_batch % count:
            raise SpecError(
                f"job.global_batch: {job.global_batch:,} tokens do not divide among {count} "
                "replica groups; choose a multiple"
            )
        job = job.but(global_batch=job.global_batch // count)
    return run._replace(strategy=run.strategy.but(replicate=1), job=job)


def settings_checksum(run: RunSpec) -> int:
    """A checksum of all settings that determine the updates; all groups must have the same."""
    table = run_table(run)
    train: dict[str, Any] = {
        k: v for k, v in table.get("train", {}).items() if k not in _OWN_SETTINGS
    }
    parts = [table.get(name) for name in ("model", "job", "strategy")]
    return zlib.crc32(json.dumps([train, *parts], sort_keys=True, default=str).encode())


def _problems(run: RunSpec) -> Iterator[str]:
    """Yield each reason why the run cannot be trained in replica groups, as a sentence."""
    strategy, engine = run.strategy, 'train.restart.engine: "torchft"'
    settings = run.train or TrainSettings()
    if importlib.util.find_spec("torchft") is None:
        yield f"{engine} needs a package; install it with 'pip install shardwise[torchft]'"
    if not strategy.sharded:
        yield f"{engine} needs hybrid sharding, but strategy.kind is '{strategy.kind}'; use zero3"
    elif (strategy.replicate or 1) == 1:
        yield (
            f"{engine} manages the replicate axis, but the strategy has none; set "
            "strategy.replicate to the number of replica groups"
        )
    elif settings.restart.min_replicas > (strategy.replicate or 1):
        yield (
            f"train.restart.min_replicas: {settings.restart.min_replicas} is more than "
            f"strategy.replicate {strategy.replicate}"
        )
    for axis in ("tensor", "context"):
        if getattr(strategy, axis) > 1:
            yield f"{engine} is not built for {axis} parallelism; set strategy.{axis} to 1"
    if strategy.shares is not None:
        yield f"{engine} is not built for unequal shares; leave strategy.shares out"
    if strategy.offload:
        yield f"{engine} is not built for offloading; leave strategy.offload out"
    yield from _batch_problems(run, engine)
    if run.adapter is not None:
        yield f"{engine} is not built for adapters; leave the section [adapter] out"
    if run.job.optimizer not in _OPTIMIZERS:
        yield (
            f"{engine} is not built for the optimizer {run.job.optimizer}; use one of "
            f"{', '.join(_OPTIMIZERS)}"
        )
    if not settings.checkpoint.save:
        yield (
            f"{engine} needs checkpoints, from which a group that returns starts; set "
            "train.checkpoint to true"
        )
    yield from _data_problems(run, engine)
    if ":" in os.environ.get("PET_NNODES", "1"):
        yield f"{engine} needs a fixed number of hosts in each group; set PET_NNODES to one number"


def _data_problems(run: RunSpec, engine: str) -> Iterator[str]:
    """Yield each reason why the data of the run cannot be used in groups."""
    if run.data is not None and run.data.source is not None:
        yield (
            f"{engine} needs data that can be read from any step on, which data.source cannot; "
            "use data.path"
        )
    if run.eval is not None:
        yield f"{engine} is not built for a held-out loss; leave the section [eval] out"


def _batch_problems(run: RunSpec, engine: str) -> Iterator[str]:
    """Yield each reason why `grad_sync` does not suit groups: when they reduce, uneven batches."""
    accumulates = run.strategy.accumulate > 1 or run.job.global_batch is not None
    if run.strategy.grad_sync == "local" and accumulates:
        yield (
            f"{engine} reduces gradients across groups whenever it reduces them inside; set "
            'strategy.grad_sync to "every" or "last"'
        )
    given = run.train is not None and run.train.restart.absent_batches == "given"
    if given and run.strategy.grad_sync != "last":
        yield (
            'train.restart.absent_batches: "given" lets groups have different numbers of '
            'micro-batches; set strategy.grad_sync to "last"'
        )
