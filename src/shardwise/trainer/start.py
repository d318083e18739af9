"""Create the Training of a run.toml, ready for its first step."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.mesh import data_rank, join, processes_per_node, world
from shardwise.engine.packing import check_packing
from shardwise.engine.parallelize import parallelize
from shardwise.engine.sync import strategy_of
from shardwise.pytorch.build import build_module
from shardwise.pytorch.device import local_device
from shardwise.spec.catalogue import this_machine
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.lookup import Model, config_folder
from shardwise.spec.model import ModelSpec
from shardwise.spec.progress import stages
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec
from shardwise.spec.shares import counts_by_rank
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import DataSettings, TrainSettings
from shardwise.trainer.admit import (
    check_batch,
    check_non_finite,
    check_sequence,
    device_kind,
)
from shardwise.trainer.data.batches import Batches, Layout, make_batches, tokenize_data
from shardwise.trainer.data.held_out import HeldOut
from shardwise.trainer.evaluation import Evaluation
from shardwise.trainer.loop import Training
from shardwise.trainer.optimizer import make_optimizer
from shardwise.trainer.replicas.group import ReplicaGroup, one_group
from shardwise.trainer.weights import pretrained_fill


def start(run: RunSpec, group: ReplicaGroup | None = None) -> tuple[RunSpec, Training]:
    """Join the other processes, build and shard the model, and open the data.

    Returns the run as these processes train it, which may be one replica `group`, and the Training.
    """
    run = one_group(run)
    settings = run.train or TrainSettings()
    device = local_device(device_kind(run, settings))
    _set_threads(settings, device)
    stages.begin("Connecting the processes")
    join(device)
    run = for_actual_processes(
        run._replace(train=settings, data=run.data or DataSettings()), device
    )
    strategy = run.strategy
    # The same on every rank: dropout must be equal in all processes of a tensor group.
    torch.manual_seed(settings.seed)

    stages.begin("Building the model")
    with torch.device("meta" if settings.meta_init else device):
        module = build_module(run.model)
    fill = pretrained_fill(module, weights_folder(run.model)) if is_pretrained(run.model) else None
    if fill is not None and not settings.meta_init:
        raise SpecError("train.meta_init: must be true for a pretrained model")
    vocab = vocabulary(run.model, module)
    stages.begin("Initialising weights" if fill is None else "Loading weights")
    model = parallelize(module, strategy, device=device, fill=fill, seed=settings.seed)
    layout = layout_of(strategy, run.job.seq_len, group)
    stages.begin("Reading data")
    batches = open_data(run.data or DataSettings(), layout, vocab, settings.seed)
    held_out = open_held_out(run, layout, vocab, settings.seed)
    packing = batches.statistics is not None and batches.statistics.packing
    if packing or (held_out is not None and held_out.is_packed):
        check_packing(module)
    stages.begin("Creating the optimizer")
    training = Training(
        model=model,
        optimizer=make_optimizer(model, run.job.optimizer, settings),
        batches=batches,
        settings=settings,
        device=device,
    )
    if held_out is not None and run.eval is not None:
        training.evaluation = Evaluation(model, device, held_out, run.eval.every)
    return run._replace(strategy=strategy_of(model)), training


def layout_of(strategy: Strategy, seq_len: int, group: ReplicaGroup | None = None) -> Layout:
    """The layout of this process: which sequences it trains.

    The processes of one context and tensor group train the same sequences.
    """
    rank, ranks = data_rank(strategy), strategy.data_parallel
    if group is not None:
        rank, ranks = rank + group.number * ranks, ranks * group.total
    counts = counts_by_rank(strategy)
    own = counts[rank] if counts else strategy.accumulate
    return Layout(rank, ranks, strategy.micro_batch, own, seq_len, counts=counts)


def open_data(data: DataSettings, layout: Layout, vocab: int | None, seed: int) -> Batches:
    """The micro-batches; one process per machine tokenizes first, while the others wait."""
    _prepare_once(data, layout.seq_len)
    return make_batches(data, layout, vocab, seed)


def open_held_out(run: RunSpec, layout: Layout, vocab: int | None, seed: int) -> HeldOut | None:
    """The held-out sequences of this rank; None for a run without [eval]."""
    if run.eval is None:
        return None
    try:
        _prepare_once(run.eval.data, layout.seq_len)
        return HeldOut(run.eval, layout, vocab, seed)
    except SpecError as error:
        raise SpecError(f"eval.{problem}" for problem in error.problems) from error


def _prepare_once(data: DataSettings, seq_len: int) -> None:
    """Tokenize files on one process per machine, while the others wait."""
    rank, size = world()
    if data.path and size > 1:
        if int(os.environ.get("LOCAL_RANK", rank)) == 0:
            tokenize_data(data, seq_len)
        dist.barrier()


def for_actual_processes(run: RunSpec, device: torch.device) -> RunSpec:
    """The run with the cluster and the strategy of the actual processes.

    So the prediction is for the step that will be measured.
    """
    _, size = world()
    per_node = processes_per_node()
    spec = run.cluster.device
    # A calibration of CPUs applies to CPUs only, and one of GPUs to GPUs.
    calibration = run.cluster.calibration if spec.is_cpu == (device.type == "cpu") else None
    if device.type == "cpu":
        spec = spec if calibration is not None else this_machine(per_node)
    elif spec.is_cpu:
        raise SpecError(
            f'cluster: names CPUs, but train.device is "{device.type}"; change one of the two'
        )
    cluster = ClusterSpec(
        device=spec,
        nodes=size // per_node,
        devices_per_node=per_node,
        network=run.cluster.network,
        calibration=calibration,
        parts=_parts_here(run.cluster, size, device),
    )
    strategy = run.strategy.resolve(size, per_node)
    run = run._replace(cluster=cluster, strategy=strategy)
    check_batch(run)
    check_sequence(run)
    check_non_finite(run)
    return run.resolved()


def _parts_here(cluster: ClusterSpec, size: int, device: torch.device) -> Any:
    """The parts of the run's cluster, if they are these processes; None without any."""
    parts = cluster.parts or ()
    if not parts or sum(part.devices for part in parts) != size:
        return None
    on_cpu = device.type == "cpu"
    known = all(part.device.is_cpu == on_cpu for part in parts)
    # The times of CPUs are known from calibrations only.
    return parts if known and (not on_cpu or all(part.calibration for part in parts)) else None


def vocabulary(model: Model, module: torch.nn.Module) -> int | None:
    """The size of the model's vocabulary; None if unknown."""
    if isinstance(model, ModelSpec):
        return model.vocab
    config: Any = getattr(module, "config", None)
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    size: int | None = getattr(config, "vocab_size", None)
    if size is None:
        tables = [m for m in module.modules() if isinstance(m, torch.nn.Embedding)]
        size = tables[0].num_embeddings if tables else None
    return size


def is_pretrained(model: Model) -> bool:
    return bool(getattr(model, "pretrained", False))


def weights_folder(model: Model) -> Path:
    """The local folder of the model's config.json, which holds pretrained weights too."""
    return config_folder(str(getattr(model, "config", "")))


def _set_threads(settings: TrainSettings, device: torch.device) -> None:
    """On a CPU, set torch's threads: train.threads, or the cores divided among processes."""
    if device.type == "cpu":
        here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(settings.threads or max(1, (os.cpu_count() or 1) // here))
