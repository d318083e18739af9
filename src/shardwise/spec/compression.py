"""Compression of gradients before they are averaged: the words of `strategy.compress`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, Protocol

from shardwise.spec.dtype import DTYPE_BYTES, DType

# The communication hooks of torch's DDP: gradients rounded to 16 bits, or matrices of low rank.
Compress = Literal["bf16", "fp16", "powersgd"]
# The first step in which torch can compress with PowerSGD, counted from 0.
FIRST_START = 2
# A matrix is compressed only if that divides its bytes by more than this, as in torch.
MIN_COMPRESSION = 2


class HasCompression(Protocol):
    """The settings of a strategy that decide whether its gradients can be compressed."""

    @property
    def kind(self) -> str: ...
    @property
    def compress(self) -> Compress | None: ...
    @property
    def kept_dtype(self) -> DType: ...
    @property
    def tensor(self) -> int: ...
    @property
    def accumulate(self) -> int: ...
    @property
    def grad_sync(self) -> str | None: ...


def problems_of_compression(strategy: HasCompression) -> Iterator[str]:
    """Settings that do not go with `compress`, one text each; none without compression."""
    compress, dtype = strategy.compress, strategy.kept_dtype
    if compress is None:
        return
    if strategy.kind != "ddp":
        yield (
            f"compress needs the hooks of DDP, and kind '{strategy.kind}' has none: leave compress "
            "out, or choose kind 'ddp'"
        )
    elif compress != "powersgd":
        if DTYPE_BYTES[dtype] <= 2:
            yield f"compress '{compress}' saves nothing: gradients are in {dtype}; leave it out"
        return
    elif dtype not in ("fp32", "fp64"):
        yield f"compress 'powersgd' needs gradients in fp32, and they are in {dtype}"
    elif strategy.tensor > 1:
        yield "compress 'powersgd' does not run with tensor parallelism; choose compress 'bf16'"
    elif strategy.accumulate > 1 and strategy.grad_sync == "every":
        yield (
            "compress 'powersgd' adds the error of a step once, so gradients are reduced once per "
            "step: set grad_sync to 'last'"
        )


def is_compressed(rows: int, columns: int, rank: int) -> bool:
    """Whether PowerSGD compresses a matrix: its two factors must be small enough."""
    low = min(rows, columns, rank)
    return (rows + columns) * low * MIN_COMPRESSION < rows * columns
