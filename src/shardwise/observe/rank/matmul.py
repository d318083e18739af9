"""How fast matrix products ran: their work by the shapes of their inputs, their time by kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec
import numpy as np

from shardwise.observe.file.trace import MATMULS, Ints, Trace
from shardwise.observe.rank.calls import launch_rows
from shardwise.observe.rank.classify import on_device
from shardwise.spec.dtype import DType
from shardwise.timeline.spans import Timeline

_DTYPES: dict[str, DType] = {"float": "fp32", "c10::bfloat16": "bf16", "c10::half": "fp16"}


class Matmul(NamedTuple):
    """All products of one type of numbers."""

    dtype: DType
    calls: int
    flops: float
    time_ns: int

    @property
    def flops_per_s(self) -> float:
        return self.flops / (self.time_ns / 1e9)


def matmul_of(trace: Trace, timeline: Timeline, span: tuple[int, int]) -> Matmul | None:
    """The products that took most of the time; None where shapes were not recorded."""
    wanted = np.isin(trace.name, [trace.code(name) for name in MATMULS])
    rows = np.flatnonzero(wanted)
    work = {row: found for row in rows.tolist() if (found := _work(trace, row)) is not None}
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


def _work(trace: Trace, row: int) -> tuple[DType, float] | None:
    """Two operations for each product of numbers."""
    try:
        dims = msgspec.json.decode(trace.shapes[row])
        types = msgspec.json.decode(trace.types[row])
        # Of addmm and baddbmm the first input is added.
        first = 1 if "add" in trace.texts[trace.name[row]] else 0
        one, other = dims[first], dims[first + 1]
        if len(one) < 2 or len(other) < 2 or one[-1] != other[-2]:
            return None
        return _DTYPES[str(types[first]).lower()], 2.0 * math.prod(one) * int(other[-1])
    except (KeyError, IndexError, TypeError, ValueError, msgspec.DecodeError):
        return None


def _times(trace: Trace, timeline: Timeline, rows: Ints, span: tuple[int, int]) -> Ints:
    """Nanoseconds of each operation: of the kernels launched in it, or on a CPU its own.

    Only what runs inside `span`; the host is often far ahead of it.
    """
    inside = (trace.start_ns >= span[0]) & (trace.start_ns < span[1])
    if not on_device(trace).any():
        return np.where(inside[rows], trace.end_ns[rows] - trace.start_ns[rows], 0)
    kernels = np.flatnonzero(on_device(trace))
    launch = launch_rows(trace, kernels)
    usable = (launch >= 0) & timeline.of_kind("compute") & inside[kernels]
    kernels, launch = kernels[usable], launch[usable]
    place = np.searchsorted(trace.start_ns[rows], trace.start_ns[launch], side="right") - 1
    # Products do not nest, so that the last one begun is the only one a launch can lie in.
    owner = rows[np.maximum(place, 0)]
    mine = (place >= 0) & (trace.start_ns[launch] < trace.end_ns[owner])
    mine &= trace.thread[launch] == trace.thread[owner]
    lasted = (trace.end_ns[kernels] - trace.start_ns[kernels]).astype(np.float64)
    sums = np.bincount(place[mine], weights=lasted[mine], minlength=len(rows))
    return sums.astype(np.int64)
