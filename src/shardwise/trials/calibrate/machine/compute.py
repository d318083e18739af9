"""Measure the rates of a device: matrix products by size and dtype, attention, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from shardwise.pytorch.device import is_accelerator, synchronize
from shardwise.spec.dtype import DType
from shardwise.trials.calibrate.machine.timing import Step, Timing, timed
from shardwise.units.module import TORCH_DTYPES

DTYPES: tuple[DType, ...] = ("fp32", "bf16")
# Edges of the square matrices. Slow devices skip the large ones.
EDGES = (128, 256, 512, 1024, 2048, 4096, 8192)
LONGEST_S = 0.5
# Queries, heads and head size of the attention that is timed.
SEQ_LEN, HEADS, HEAD_DIM = 1024, 8, 64
# Elements of the memory and optimizer tests: more than caches hold. Accelerators get more.
ELEMENTS, OPTIMIZED = 2**24, 2**22
MORE_ON_ACCELERATOR = 16


class Product(NamedTuple):
    """A timed product of two square matrices; `rate` is in FLOP per second."""

    dtype: DType
    edge: int
    timing: Timing

    @property
    def flops(self) -> float:
        return 2.0 * self.edge**3

    @property
    def rate(self) -> float:
        return self.flops / self.timing.median_s


class Compute(NamedTuple):
    """The measured rates of one device.

    `attention_rate` is in FLOP per second, `copy_rate` in bytes per second, `launch_s` the seconds
    of a tiny operation.
    """

    products: list[Product]
    attention_rate: float
    copy_rate: float
    # Bytes per second of operations that read and write full tensors, as modules run them.
    elementwise_rate: float
    launch_s: float
    # Bytes of parameters, gradients and states per second of an optimizer step.
    optimizer_rate: float


def measure_products(device: torch.device, step: Step) -> Iterator[Product]:
    """Time matrix products of both dtypes by size, up to a size that takes too long."""
    for dtype in DTYPES:
        longest = 0.0
        for edge in EDGES:
            # Eight times the work of the size before.
            if 8 * longest > LONGEST_S:
                break
            step("matmul", f"{dtype} {edge}")
            kind = TORCH_DTYPES[dtype]
            a = torch.randn(edge, edge, device=device).to(kind)
            b = torch.randn(edge, edge, device=device).to(kind)
            found = Product(dtype, edge, timed(_product(a, b), device))
            longest = found.timing.median_s
            yield found


def _product(a: torch.Tensor, b: torch.Tensor) -> Callable[[], object]:
    return lambda: a @ b


def measure_compute(device: torch.device, step: Step) -> Compute:
    """Measure the rates of the device; `step` is called before each part.

    All processes of a machine measure at the same time, as they compute in training.
    """
    found = list(measure_products(device, step))
    step("attention")
    attention = _attention(device)
    step("memory")
    copied, mixed, numbers = _memory(device)
    step("launch")
    small = torch.ones(1, device=device)
    launched = timed(lambda: small.add_(1), device, inner=500)
    step("optimizer")
    optimized, held = _optimizer(device)
    return Compute(
        products=found,
        attention_rate=_attention_flops() / attention.median_s,
        copy_rate=2 * 4 * numbers / copied.median_s,
        # SiLU reads and writes one tensor; the product reads two and writes one.
        elementwise_rate=5 * 4 * numbers / mixed.median_s,
        launch_s=launched.median_s,
        optimizer_rate=held / optimized.median_s,
    )


def _size_factor(device: torch.device) -> int:
    """The factor by which memory tests are larger on this device."""
    return MORE_ON_ACCELERATOR if is_accelerator(device) else 1


def _memory(device: torch.device) -> tuple[Timing, Timing, int]:
    """The timings of a copy and of SiLU times a tensor, and the elements of each tensor."""
    numbers = ELEMENTS * _size_factor(device)
    a, b, out = (torch.ones(numbers, device=device) for _ in range(3))
    copied = timed(lambda: out.copy_(a), device)
    return copied, timed(lambda: silu(a) * b, device), numbers


def _attention(device: torch.device) -> Timing:
    """The timing of one forward of causal attention."""
    kind = torch.bfloat16 if is_accelerator(device) else torch.float32
    q, k, v = (
        torch.randn(1, HEADS, SEQ_LEN, HEAD_DIM, device=device, dtype=kind) for _ in range(3)
    )
    return timed(lambda: scaled_dot_product_attention(q, k, v, is_causal=True), device)


def _attention_flops() -> float:
    """FLOPs of the timed attention: half of two full products, since it is causal."""
    return 0.5 * 4.0 * SEQ_LEN**2 * HEADS * HEAD_DIM


def _optimizer(device: torch.device) -> tuple[Timing, int]:
    """The timing of a fused AdamW step, as `shardwise train` uses it, and the bytes it touches.

    The bytes are those of parameters, gradients and both states.
    """
    numbers = OPTIMIZED * _size_factor(device)
    parameters = [torch.nn.Parameter(torch.randn(numbers // 8, device=device)) for _ in range(8)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    for one in parameters:
        one.grad = torch.randn_like(one)
    optimizer.step()  # creates its state
    synchronize(device)
    return timed(optimizer.step, device), 4 * 4 * numbers
