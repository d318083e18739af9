"""Element-wise operations, casts and losses: bytes at a share of the memory's rate.

Bytes are the least that has to be read and written, so an operation of many kernels has a low
share. Below BYTES a cache answers, and the time is that of a launch.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.kernels.fitting import Numbers, Prior, Values
from benchmarks.kernels.study import Key, Problem, Result, Skipped, grouped, solve, too_few
from benchmarks.kernels.tables import Row, read
from shardwise.spec.kernels import memory_bound_s

BYTES = 32 * 2**20
# Faster than the memory of a device: from a cache.
FASTEST = 0.95
SHARE = Prior(0.6, 1.0, high=1.0)
OPERATIONS = {
    "rms_norm": "RMSNorm",
    "megatron_rms_norm": "RMSNorm",
    "layer_norm": "LayerNorm",
    "fused_add_rms_norm": "add and RMSNorm",
    "megatron_swiglu": "SwiGLU",
    "relu_squared": "squared ReLU",
    "rope": "RoPE",
    "llama4_rope": "RoPE, complex",
    "softmax": "softmax",
    "cross_entropy": "cross-entropy",
    "megatron_cross_entropy": "cross-entropy, vocabulary sharded",
    "clone": "copy",
    "static fp8 cast": "to fp8, scale known",
}
IMPLEMENTATIONS = {
    "pytorch": "eager",
    "torch": "eager",
    "huggingface": "eager",
    "megatron-unfused": "eager",
    "torch_compile": "compiled",
    "cudnn": "cuDNN",
    "liger": "Liger",
    "liger_in_place": "Liger, in place",
    "liger_fused_add_rms_norm": "Liger, fused",
    "liger_rms_norm": "Liger, not fused",
    "megatron": "Megatron",
    "megatron-fused": "Megatron",
    "sglang": "SGLang",
    "trtllm": "TRT-LLM",
    "vllm": "vLLM",
}
LOSSES = ("cross-entropy",)
WAYS = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}


def studies() -> Iterator[Result]:
    """Every operation, implementation and device of the table."""
    yield from _streams()
    for key, rows in grouped(_timed(), _key).items():
        moved = np.asarray([row.number("bytes") for row in rows])
        reason = too_few(moved)
        if reason:
            yield Skipped(key, len(rows), reason)
            continue
        rate = rows[0].number("peak_gbps") * 1e9
        seconds = np.asarray([row.number("ms") for row in rows]) / 1e3

        def form(v: Values, moved: Numbers = moved, rate: float = rate) -> Numbers:
            found: Numbers = memory_bound_s(moved, rate, v["share"], v["call_s"])
            return found

        priors = {"share": SHARE, "call_s": Prior(8e-6, 0.7)}
        yield solve(key, Problem(rows, seconds, form, priors, moved, rate, {}))


def _streams() -> Iterator[Result]:
    """STREAM: only rates were published, of arrays far larger than any cache."""

    def named(row: Row) -> Key | None:
        stream = row.cells["op"].startswith("stream ")
        return Key(row.device, "elementwise", "STREAM", "fp64") if stream else None

    for key, rows in grouped(read("elementwise"), named).items():
        rate = rows[0].number("peak_gbps") * 1e9
        shares = np.asarray([row.number("gbps") * 1e9 for row in rows]) / rate
        moved = np.full(len(rows), 2.0**30)

        def form(v: Values, moved: Numbers = moved, rate: float = rate) -> Numbers:
            found: Numbers = memory_bound_s(moved, rate, v["share"])
            return found

        problem = Problem(
            rows, moved / (shares * rate), form, {"share": SHARE}, moved, rate, {"call_s": 0.0}
        )
        study = solve(key, problem)
        yield study._replace(entry={k: v for k, v in study.entry.items() if k != "fitted"})


def _timed() -> list[Row]:
    rows = [row for row in read("elementwise") if row.cells["ms"] and row.cells["bytes"]]
    return [
        row for row in rows if row.number("bytes") >= BYTES and row.number("efficiency") <= FASTEST
    ]


def _key(row: Row) -> Key | None:
    cells = row.cells
    operation = OPERATIONS.get(cells["op"])
    if operation is None:
        return None
    # Both passes together say nothing that each alone does not, where each was measured.
    if cells["pass"] == "fwd+bwd" and cells["op"] != "cross_entropy":
        return None
    implementation = IMPLEMENTATIONS.get(cells["library"], cells["library"])
    family = "loss" if operation.startswith(LOSSES) else "elementwise"
    if "fp8" in operation:
        return Key(row.device, "cast", f"{operation}, {implementation}", cells["dtype"])
    way = WAYS.get(cells["pass"], "forward")
    dtype = "bf16" if cells["dtype"] in ("", "bf16", "fp16") else cells["dtype"]
    return Key(row.device, family, f"{operation} {way}, {implementation}", dtype)
