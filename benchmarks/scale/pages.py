"""Cost of a report from traces with three streams, by ranks and by spans per stream."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.page import rows
from benchmarks.scale.cost import Case, Measured, Part, cpu_s, in_subprocess, size, timed

STREAMS = {7: "gemm_{}", 20: "ncclDevKernel_AllGather_{}", 24: "ncclDevKernel_ReduceScatter_{}"}


def measure(ranks: int, spans: int) -> dict[str, float]:
    """Measure the complete command, from traces on disk to a page on disk."""
    with tempfile.TemporaryDirectory() as place:
        folder, page = Path(place, "traces"), Path(place, "report.html")
        in_subprocess(write, folder, ranks, spans)
        begun, used = time.perf_counter(), cpu_s()
        command = [sys.executable, "-m", "shardwise", "report", str(folder), "-o", str(page)]
        subprocess.run(command, check=True, capture_output=True)
        return {
            "page_s": cpu_s() - used,
            "elapsed_s": time.perf_counter() - begun,
            "page_bytes": page.stat().st_size,
        }


def write(folder: Path, ranks: int, spans: int) -> None:
    """Write traces with spans of random lengths: equal lengths would compress to nothing."""
    folder.mkdir()
    for rank in range(ranks):
        chance = random.Random(rank)
        events: list[dict[str, Any]] = []
        for stream, name in STREAMS.items():
            at = 1000.0
            for number in range(spans):
                at += chance.uniform(0.1, 20)
                lasts = chance.uniform(1, 200)
                events.append(
                    {"ph": "X", "cat": "kernel", "name": name.format(number % 40), "pid": 0,
                     "tid": stream, "ts": round(at, 3), "dur": round(lasts, 3),
                     "args": {"device": rank % 8, "stream": stream, "correlation": number}}
                )  # fmt: skip
                at += lasts
        step = {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#5", "pid": 0,
                "tid": 7, "ts": 1000.0, "dur": 1e6}  # fmt: skip
        about = {"rank": rank, "world_size": ranks, "backend": "nccl"}
        text = json.dumps({"distributedInfo": about, "traceEvents": [step, *events]})
        packed = gzip.compress(text.encode(), compresslevel=1)
        (folder / f"rank{rank}.json.gz").write_bytes(packed)


def table(found: list[Measured]) -> str:
    return rows(
        ["ranks", "spans per stream (3 streams)", "CPU time", "wall-clock time", "page size"],
        [
            [f"{one.case['ranks']:,}", f"{one.case['spans']:,}", timed(one, "page_s"),
             timed(one, "elapsed_s"), size(one["page_bytes"])]
            for one in found
        ],
    )  # fmt: skip


CASES: list[Case] = [
    {"ranks": 1, "spans": 1000},
    {"ranks": 8, "spans": 1000},
    {"ranks": 64, "spans": 1000},
    {"ranks": 1, "spans": 64_000},
]
PART = Part("Report", CASES, CASES[:1], measure, table)
