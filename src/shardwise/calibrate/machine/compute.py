"""What a device computes and moves: matrix products by size and dtype, attention, memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from shardwise.calibrate.machine.timing import Step, Timing, timed
from shardwise.engine.device import is_accelerator, synchronize
from shardwise.spec.dtype import DType
from shardwise.units.module import TORCH_DTYPES

DTYPES: tuple[DType, ...] = ("fp32", "bf16")
# Edges of square products. A device that is fast enough is given the large ones too.
EDGES = (128, 256, 512, 1024, 2048, 4096, 8192)
LONGEST_S = 0.5
# Queries, heads and head size of the attention that is timed.
SEQ_LEN, HEADS, HEAD_DIM = 1024, 8, 64
# Numbers a memory test works on: more than caches hold. An accelerator is given more.
ELEMENTS, OPTIMIZED = 2**24, 2**22
MORE_ON_ACCELERATOR = 16


class Product(NamedTuple):
    """A product of two square matrices."""

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
    """All that one device does by itself; bytes and FLOP per second, and seconds."""

    products: list[Product]
    attention_rate: float
    copy_rate: float
    # Bytes per second of operations that read and write whole tensors, as modules run them.
    elementwise_rate: float
    launch_s: float
    # Bytes of parameters, gradients and states per second of an optimizer step.
    optimizer_rate: float


def products(device: torch.device, step: Step) -> Iterator[Product]:
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
    """`step` is told what comes next. Processes of one machine do this together, as in training."""
    found = list(products(device, step))
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
        # Read and written by the one, two read and one written by the other.
        elementwise_rate=5 * 4 * numbers / mixed.median_s,
        launch_s=launched.median_s,
        optimizer_rate=held / optimized.median_s,
    )


def _more(device: torch.device) -> int:
    return MORE_ON_ACCELERATOR if is_accelerator(device) else 1


def _memory(device: torch.device) -> tuple[Timing, Timing, int]:
    """A copy, and what modules do element by element: each call reads and writes whole tensors."""
    numbers = ELEMENTS * _more(device)
    a, b, out = (torch.ones(numbers, device=device) for _ in range(3))
    copied = timed(lambda: out.copy_(a), device)
    return copied, timed(lambda: silu(a) * b, device), numbers


def _attention(device: torch.device) -> Timing:
    kind = torch.bfloat16 if is_accelerator(device) else torch.float32
    q, k, v = (
        torch.randn(1, HEADS, SEQ_LEN, HEAD_DIM, device=device, dtype=kind) for _ in range(3)
    )
    return timed(lambda: scaled_dot_product_attention(q, k, v, is_causal=True), device)


def _attention_flops() -> float:
    """A causal kernel does half of what two full products are."""
    return 0.5 * 4.0 * SEQ_LEN**2 * HEADS * HEAD_DIM


def _optimizer(device: torch.device) -> tuple[Timing, int]:
    """An AdamW step as `shardwise train` makes it, and the bytes of all it touches."""
    numbers = OPTIMIZED * _more(device)
    parameters = [torch.nn.Parameter(torch.randn(numbers // 8, device=device)) for _ in range(8)]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    for one in parameters:
        one.grad = torch.randn_like(one)
    optimizer.step()  # makes its state
    synchronize(device)
    return timed(optimizer.step, device), 4 * 4 * numbers
