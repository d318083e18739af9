"""A trace of four events, written by hand."""

from __future__ import annotations

from typing import Any


def event(name: str, ts: float, dur: float, cat: str = "kernel", **args: Any) -> dict[str, Any]:
    about = {"device": 0, "stream": 7, "correlation": 1, **args}
    return {"ph": "X", "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": ts, "dur": dur,
            "args": about}  # fmt: skip


EVENTS = [
    event("gemm", 100.0, 50.0),
    event("ncclDevKernel_AllGather", 120.0, 60.0, stream=20),
    event("gemm", 200.0, 25.5),
    event("Memcpy DtoD", 230.0, 5.0, cat="gpu_memcpy", bytes=4096),
]
TRACE = {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 2}, "traceEvents": EVENTS}
