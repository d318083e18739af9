"""Matmul throughput: FLOPs from recorded input shapes, time from kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import numpy as np

from shardwise.observe.file.trace import MATMULS, Ints, Trace
from shardwise.observe.rank.calls import launch_rows
from shardwise.observe.rank.classify import on_device
from shardwise.spec.dtype import DType
from shardwise.step.spans import Timeline

_DTYPES: dict[str, DType] = {"float": "fp32", "c10::bfloat16": "bf16", "c10::half": "fp16"}


class Matmul(NamedTuple):
    """All matmuls of one dtype inside the profiled steps."""

    dtype: DType
    calls: int
    flops: float
    time_ns: int

    @property
    def flops_per_s(self) -> float:
        return self.flops / (self.time_ns / 1e9)


def matmul_of(trace: Trace, timeline: Timeline, span: tuple[int, int]) -> Matmul | None:
    """The matmuls of the dtype that takes most time; None where shapes were not recorded."""
    wanted = np.isin(trace.name, [trace.code(name) for name in MATMULS])
    rows = np.flatnonzero(wanted)
    work = {row: one for row in rows.tolist() if (one := _dtype_and_flops(trace, row)) is not None}
    if not work:
        return None
    rows = np.asarray(list(work), dtype=np.int64)
    rows = rows[np.argsort(trace.start_ns[rows], kind="stable")]
    times = _times(trace, timeline, rows, span)
    sums: dict[DType, list[float]] = {}
    for row, time in zip(rows.tolist(), times.tolist(), strict=True):
        dtype, flops = work[row]
        if time > 0:
            mine = sums.setdefault(dtype, [0, 0.0, 0])
            mine[0] += 1
            mine[1] += flops
            mine[2] += time
    if not sums:
        return None
    dtype, (calls, flops, time_ns) = max(sums.items(), key=lambda item: item[1][2])
    return Matmul(dtype, int(calls), flops, int(time_ns))


def _dtype_and_flops(trace: Trace, row: int) -> tuple[DType, float] | None:
    """Dtype and FLOPs of one matmul: 2 × m × n × k; None where its shapes are unknown."""
    try:
        dims = msgspec.json.decode(trace.shapes[row])
        types = msgspec.json.decode(trace.types[row])
        # The first input of addmm and baddbmm is the bias.
        first = 1 if "add" in trace.texts[trace.name[row]] else 0
        one, other = dims[first], dims[first + 1]
        if len(one) < 2 or len(other) < 2 or one[-1] != other[-2]:
            return None
        return _DTYPES[str(types[first]).lower()], 2.0 * math.prod(one) * int(other[-1])
    except (KeyError, IndexError, TypeError, ValueError, msgspec.DecodeError):
        return None


def _times(trace: Trace, timeline: Timeline, rows: Ints, span: tuple[int, int]) -> Ints:
    """Nanoseconds of each matmul of `rows` within `span`; 0 without any.

    On a GPU the sum of its compute kernels that start in the span, whenever they were launched; on
    a CPU the duration of the operation if it starts in the span.
    """
    inside = (trace.start_ns >= span[0]) & (trace.start_ns < span[1])
    if not on_device(trace).any():
        return np.where(inside[rows], trace.end_ns[rows] - trace.start_ns[rows], 0)
    kernels = np.flatnonzero(on_device(trace))
    launch = launch_rows(trace, kernels)
    usable = (launch >= 0) & timeline.of_kind("compute") & inside[kernels]
    kernels, launch = kernels[usable], launch[usable]
    index = np.searchsorted(trace.start_ns[rows], trace.start_ns[launch], side="right") - 1
    # Matmuls do not nest: a launch can only belong to the matmul that started last.
    owner = rows[np.maximum(index, 0)]
    mine = (index >= 0) & (trace.start_ns[launch] < trace.end_ns[owner])
    mine &= trace.thread[launch] == trace.thread[owner]
    durations = (trace.end_ns[kernels] - trace.start_ns[kernels]).astype(np.float64)
    sums = np.bincount(index[mine], weights=durations[mine], minlength=len(rows))
    return sums.astype(np.int64)
