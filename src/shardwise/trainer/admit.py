"""Checks of a run that need no torch, so that an invalid run fails before processes launch."""

from __future__ import annotations

from pathlib import Path

from shardwise.spec.fused_loss import check_fused_loss
from shardwise.spec.huggingface import config_table, trains_text
from shardwise.spec.lookup import ConfigRef, Model
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec, check_loss
from shardwise.spec.train import TrainSettings
from shardwise.trainer.data.tokenize import find_files
from shardwise.trainer.replicas.group import one_group, replica_group


def check_can_train(run: RunSpec, processes: int, per_node: int) -> None:
    """Raise SpecError if `processes` processes cannot train the run.

    Checks the kind of model, the strategy's degrees, the loss, the batch and the sequence length,
    and that the data files exist. `per_node` is the number of processes on one machine.
    """
    check_is_causal(run.model)
    check_method(run)
    replica_group(run)
    run = one_group(run)
    strategy = run.strategy.resolve(processes, per_node)
    check_loss(run)
    check_fused_loss(strategy, device_kind(run, run.train or TrainSettings()))
    check_batch(run._replace(strategy=strategy))
    check_sequence(run._replace(strategy=strategy))
    check_non_finite(run)
    if run.data is not None and run.data.path:
        find_files(run.data.path)
    _check_eval(run)


def _check_eval(run: RunSpec) -> None:
    """Raise SpecError unless the held-out files exist and the best checkpoint can be kept."""
    if run.eval is None:
        return
    if run.eval.keep_best and run.train is not None and not run.train.checkpoint.save:
        raise SpecError(
            "eval.keep_best: train.checkpoint is false, so no checkpoint exists; set it true"
        )
    if run.eval.data.path:
        try:
            find_files(run.eval.data.path)
        except SpecError as error:
            raise SpecError(f"eval.{problem}" for problem in error.problems) from error


def check_is_causal(model: Model) -> None:
    """Raise SpecError for a configuration of a model that does not predict the next token."""
    if not isinstance(model, ConfigRef):
        return
    config = config_table(Path(model.config))
    if trains_text(config) is False:
        raise SpecError(
            f"model: {model.name} is {str(config['architectures'])[:80]}, which does not predict "
            "the next token, and 'train' trains models that do; it can be planned, and trained "
            "with the Trainer: shardwise export --to trainer"
        )


def check_method(run: RunSpec) -> None:
    """Raise SpecError for a training method or a length that only other stacks have."""
    if run.train is not None and run.train.epochs is not None:
        raise SpecError(
            "train.epochs: Shardwise trains by steps; set train.steps and leave epochs out"
        )
    if run.job.method is not None:
        raise SpecError(
            f"job.method: Shardwise plans {run.job.method} but does not train it; export the run: "
            "shardwise export run.toml --to trl"
        )


def check_batch(run: RunSpec) -> None:
    """Raise SpecError unless the global batch is a multiple of all ranks' micro-batches."""
    wanted = run.job.global_batch
    if run.strategy.shares is not None:
        run.job.split(run.strategy)
        return
    unit = run.job.seq_len * run.strategy.micro_batch * run.strategy.data_parallel
    if wanted is not None and wanted % unit:
        near = max(1, round(wanted / unit)) * unit
        counted = "processes" if run.strategy.mesh.inner == 1 else "data-parallel groups"
        raise SpecError(
            f"job.global_batch: {wanted:,} tokens is not a multiple of {unit:,} "
            f"(micro-batch {run.strategy.micro_batch} × {run.job.seq_len:,} tokens × "
            f"{run.strategy.data_parallel} {counted}); the nearest multiple is {near:,}"
        )


def check_non_finite(run: RunSpec) -> None:
    """Raise SpecError if steps with a non-finite gradient could not be skipped."""
    skips = run.train is not None and run.train.non_finite == "skip"
    if skips and run.strategy.compress == "powersgd":
        raise SpecError(
            "train.non_finite: PowerSGD adds the error of a step to the next, so a non-finite "
            'gradient would stay in all later ones; set it to "stop"'
        )


def check_sequence(run: RunSpec) -> None:
    """Raise SpecError unless the context and tensor degrees divide the sequence length evenly."""
    strategy = run.strategy
    tensor = strategy.tensor if strategy.sequence_parallel else 1
    # Ring attention gives each process two pieces, one from either end, for equal work.
    pieces = 2 if strategy.context > 1 and strategy.context_method == "ring" else 1
    parts = pieces * strategy.context * tensor
    if run.job.seq_len % parts:
        by = [f"{axis} {n}" for axis, n in (("context", strategy.context), ("tensor", tensor))
              if n > 1]  # fmt: skip
        near = max(1, round(run.job.seq_len / parts)) * parts
        raise SpecError(
            f"job.seq_len: {run.job.seq_len:,} is not a multiple of {parts}, by which "
            f"{' x '.join(by)} divides sequences; the nearest multiple is {near:,}"
        )


def device_kind(run: RunSpec, settings: TrainSettings) -> str:
    """The device type to train on: train.device, but "cpu" for "auto" on a cluster of CPUs."""
    if settings.device == "auto" and run.cluster.device.is_cpu:
        return "cpu"
    return settings.device
