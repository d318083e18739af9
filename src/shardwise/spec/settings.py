"""Typed keyword arguments of the Python functions: the fields of Job and Strategy.

A `TypedDict` with `Unpack` lists them once for several functions, for type checkers and editors.
`keywords` shows the same list to `help()` and to notebooks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar, cast

from shardwise.spec.adapter import Adapter
from shardwise.spec.compression import Compress
from shardwise.spec.dispatch import Dispatch
from shardwise.spec.dtype import DType, LinearDType
from shardwise.spec.job import Method
from shardwise.spec.optimizer import Optimizer
from shardwise.spec.record import did_you_mean
from shardwise.spec.states import States
from shardwise.spec.strategy import Attention, ContextMethod, GradSync, Loss, LossKernel

P = ParamSpec("P")
R = TypeVar("R")
# Sets param_dtype and reduce_dtype at once.
Precision = Literal["bf16", "fp16", "fp32", "fp8", "mxfp8", "nvfp4"]


class JobSettings(TypedDict, total=False):
    """The fields of Job. Counts may be text, such as "4Mi"."""

    seq_len: int | str | None
    global_batch: int | str | None
    optimizer: Optimizer | None
    method: Method | None
    reference: bool | None
    routing: float | None
    generation_memory: int | str | None


class FixedSettings(TypedDict, total=False):
    """Fields of Strategy that a plan takes as given: dtypes, compilation, loss and offload."""

    param_dtype: DType | None
    reduce_dtype: DType | None
    master_dtype: DType | None
    states: States | None
    linear_dtype: LinearDType | None
    low_bit_gather: bool | None
    compile: bool | None
    loss: Loss | None
    loss_kernel: LossKernel | None
    attention: Attention | None
    dispatch: Dispatch | None
    offload: bool | str | list[str] | None


class StrategySettings(FixedSettings, total=False):
    """The fields of Strategy except `kind`, which the argument `strategy` gives."""

    shard: int | None
    replicate: int | None
    within_node: bool | None
    context: int | None
    context_method: ContextMethod | None
    expert: int | None
    tensor: int | None
    sequence_parallel: bool | None
    tensor_across_nodes: bool | None
    micro_batch: int | None
    accumulate: int | None
    # Micro-batches by part of the cluster, such as "3,2".
    shares: str | None
    recompute: Literal["none", "selective", "full"] | float | None
    reshard_after_forward: bool | int | None
    reshard_after_backward: bool | None
    grad_sync: GradSync | None
    prefetch: int | None
    forward_prefetch: int | None
    blocks_per_unit: int | None
    split_root: bool | None
    loss_chunks: int | None
    ddp_bucket_mib: float | None
    compress: Compress | None
    powersgd_rank: int | None
    powersgd_start: int | None


class PlanSettings(JobSettings, FixedSettings, total=False):
    """Keywords of `plan`: the job and the dtypes. Everything else is searched."""

    precision: Precision | None
    # The software of the run: a name of `shardwise catalog software`.
    software: str | None
    # Such as "lora:16".
    adapter: str | Adapter | None


class RunSettings(JobSettings, StrategySettings, total=False):
    """Keywords of `estimate`: one complete configuration."""

    precision: Precision | None
    software: str | None
    adapter: str | Adapter | None


class _Annotation(str):
    """The text of an annotation; a signature shows it without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def keywords(settings: type) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator that expands `**settings: Unpack[settings]` in the signature.

    The decorated function raises TypeError for unknown keyword arguments.
    """
    known = settings.__annotations__

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        shown = inspect.signature(function)
        own = [p for p in shown.parameters.values() if p.kind is not p.VAR_KEYWORD]
        names = [*(p.name for p in own), *known]
        more = [
            inspect.Parameter(
                name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_text(t)
            )
            for name, t in known.items()
        ]

        @wraps(function)
        def checked(*args: P.args, **given: P.kwargs) -> R:
            for name in given:
                if name not in names:
                    hint = did_you_mean(name, names) or f"; known are {', '.join(names)}"
                    raise TypeError(f"{function.__name__}: unknown argument {name}{hint}")
            return function(*args, **given)

        parameters = [*(p.replace(annotation=_text(p.annotation)) for p in own), *more]
        cast(Any, checked).__signature__ = inspect.Signature(
            parameters, return_annotation=_text(shown.return_annotation)
        )
        return checked

    return decorate


def _text(annotation: Any) -> _Annotation:
    """An annotation as text for a signature."""
    return _Annotation(getattr(annotation, "__forward_arg__", annotation))
