"""The choices of a run: settings that select the code of a script and are not constants in it."""

from __future__ import annotations

import math

from shardwise.spec.dtype import TORCH_NAMES, DType
from shardwise.spec.lookup import ModuleRef
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.stacks.write.python.constants import Code
from shardwise.stacks.write.python.data import vocabulary_is_known
from shardwise.stacks.write.python.imports import Import
from shardwise.stacks.write.python.model import builder_of, fills, model_choices
from shardwise.stacks.write.python.settings import data_of, is_fused, on_cpu, train_of
from shardwise.units.decoder import decoder_units


def choices_of(run: RunSpec) -> dict[str, object]:
    """All choices of a run, by the name that the program uses."""
    return {**_model(run), **_data(run), **_parallel(run), **_loop(run)}


def _model(run: RunSpec) -> dict[str, object]:
    """Choices about the model and how it is built."""
    model, strategy = run.model, run.strategy
    builder = builder_of(run)
    meta = fills(run)
    return {
        "MODEL": builder,
        "CONFIG_IS_PATH": not isinstance(model, ModelSpec) or model.config is not None,
        **model_choices(run),
        "PRETRAINED": bool(getattr(model, "pretrained", False)),
        "META_INIT": meta,
        "ON_META": strategy.sharded if builder == "written" else meta,
        "FACTORY": _function("own_model", model.factory) if isinstance(model, ModuleRef) else None,
        # With tensor or context parallelism the script has its own attention function.
        "ATTENTION": "whole_sequences" if strategy.mesh.inner > 1 else "sdpa",
    }


def _function(alias: str, reference: str) -> Code:
    """The attribute of a `module:function` reference as code, on the module's alias."""
    return Code(f"{alias}.{reference.partition(':')[2]}")


def own_imports(run: RunSpec) -> tuple[Import, ...]:
    """The imports of the user's own modules, for the model and the data."""
    references = {"own_data": data_of(run).source}
    if isinstance(run.model, ModuleRef):
        references["own_model"] = run.model.factory
    return tuple(
        Import(reference.partition(":")[0], None, alias)
        for alias, reference in references.items()
        if reference is not None
    )


def _data(run: RunSpec) -> dict[str, object]:
    """Choices about the data."""
    data = data_of(run)
    kind = "own" if data.source is not None else "synthetic" if data.synthetic else "tokens"
    source = None if data.source is None else _function("own_data", data.source)
    return {
        "DATA": kind,
        "READS_VOCABULARY": not vocabulary_is_known(run),
        "SHUFFLE": data.shuffle,
        "SOURCE": source,
    }


def _parallel(run: RunSpec) -> dict[str, object]:
    """Choices about parallelism, recompute, dtypes and the loss."""
    strategy = run.strategy
    kind = "sharded" if strategy.sharded else strategy.kind
    several = strategy.accumulate > 1
    recompute = strategy.recompute
    if recompute != "selective":
        recompute = "full" if strategy.full_recompute_share > 0 else "none"
    return {
        "KIND": kind,
        "WRAPS_DDP": kind == "ddp",
        # The model that is part of the program has no buffers.
        "SYNCS_BUFFERS": builder_of(run) == "written",
        "COMPRESS": strategy.compress,
        "DIVIDED": strategy.mesh.inner > 1,
        "SEQUENCE_PARALLEL": strategy.sequence_parallel,
        "TENSOR_ACROSS_NODES": strategy.tensor_across_nodes,
        "HEAD_REPEATS": _head_repeats(run),
        "SEQUENCE_PARTS": strategy.context,
        "PLACES": _shards_other_dimensions(run),
        "OFFLOAD": strategy.offloads("parameters"),
        "RECOMPUTE": recompute,
        "COMPILE": strategy.compile,
        "CHUNKED_LOSS": strategy.loss != "plain",
        "AUTOCAST": strategy.autocast,
        "PARAM_DTYPE": _dtype(strategy.param_dtype),
        "REDUCE_DTYPE": _dtype(strategy.reduce_dtype),
        "MASTER_DTYPE": _dtype(strategy.master_dtype),
        "UPCASTS": strategy.param_dtype != "fp64",
        **(
            _synchronisation(strategy)
            if several
            else dict.fromkeys(_synchronisation(strategy), False)
        ),
    }


def _dtype(dtype: DType) -> Code:
    """The dtype as code, such as `torch.bfloat16`."""
    return Code(f"torch.{TORCH_NAMES[dtype]}")


def _synchronisation(strategy: Strategy) -> dict[str, bool]:
    """What is done only in the last of several micro-batches of a step."""
    sharded = strategy.sharded
    return {
        "SYNCS_LAST": sharded and strategy.grad_sync == "last",
        "REDUCES_LAST": strategy.hybrid and strategy.grad_sync == "local",
        "RESHARDS_LAST": sharded and not strategy.reshard_after_backward,
        "SKIPS_SYNC": strategy.kind == "ddp" and strategy.grad_sync != "every",
    }


def _head_repeats(run: RunSpec) -> int:
    """How often each key and value head is repeated, so that every context rank has one."""
    strategy = run.strategy
    if not isinstance(run.model, ModelSpec):
        return 1
    held = run.model.kv_heads // strategy.tensor
    return strategy.context // math.gcd(held, strategy.context)


def _shards_other_dimensions(run: RunSpec) -> bool:
    """Whether a parameter is sharded along another dimension than the first."""
    strategy, model = run.strategy, run.model
    if not strategy.sharded or not isinstance(strategy.reshard_after_forward, bool):
        return False
    if not isinstance(model, ModelSpec):
        # The shapes are known only when the model is built.
        return True
    units = decoder_units(model, run.job.seq_len).units
    return any(unit.rearranged(strategy.mesh.states) for unit in units)


def _loop(run: RunSpec) -> dict[str, object]:
    """Choices about the training loop."""
    train, strategy = train_of(run), run.strategy
    backend = "gloo" if on_cpu(run) else "nccl"
    if strategy.offloads("parameters") and not on_cpu(run):
        # The norm of offloaded gradients is reduced on CPUs.
        backend = "cpu:gloo,cuda:nccl"
    return {
        "BACKEND": backend,
        "OPTIMIZER": run.job.optimizer,
        "FUSED": is_fused(run),
        "SCHEDULE": train.schedule,
        "NON_FINITE": train.non_finite,
        "SAVES": train.checkpoint.save,
    }
