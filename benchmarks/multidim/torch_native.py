"""FSDP2 with tensor or context parallelism in torchtitan and TRL: each published run is listed.

Nothing is fitted here: predictions are those of `shardwise.estimate`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import shardwise
from benchmarks.multidim.rows import GIB, read_table
from shardwise.spec.lookup import find_model
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy

DEVICES = {"H100-96GB-HBM2e-500W": "H100-96GB-500W", "H100-80GB": "H100-SXM"}
PRESETS = {
    "llama3.1-8b": "llama-3.1-8b",
    "llama3.1-70b": "llama-3.1-70b",
    "qwen3-0.6b": "qwen3-0.6b",
    "qwen3-8b": "qwen3-8b",
    "qwen3-32b": "qwen3-32b",
}
# Neither source names its network.
NETWORK = "400Gbps"
RECOMPUTE = {"selective-op": "selective", "full": "full"}
# Bytes of the unit that a source states for memory.
MEMORY_UNITS = {"torchtitan": GIB, "TRL": 1e9}


class Listed(NamedTuple):
    """A published run: its error, or why it is not predicted."""

    source: str
    model: str
    layout: str
    measured: float
    predicted: float | None
    measured_bytes: float | None
    predicted_bytes: float | None
    why: str

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.measured - 1

    @property
    def memory_error(self) -> float | None:
        if self.predicted_bytes is None or self.measured_bytes is None:
            return None
        return self.predicted_bytes / self.measured_bytes - 1


def read_listed() -> list[Listed]:
    """Runs with tensor or context parallelism, but none with pipelines or experts."""
    rows = [
        row
        for row in read_table("torch_native_multidim")
        if row["framework"].startswith(("torchtitan", "TRL"))
    ]
    return [_listed(row) for row in rows if _degree(row, "tp") > 1 or _degree(row, "cp") > 1]


def _degree(row: dict[str, str], axis: str) -> int:
    return int(row[axis] or 1)


def _listed(row: dict[str, str]) -> Listed:
    degrees = [
        f"{axis} {_degree(row, axis)}" for axis in ("tp", "pp", "cp") if _degree(row, axis) > 1
    ]
    asynchronous = ["async tp"] if row["async_tp"] == "True" else []
    parts = [f"{row['gpus']} GPUs", *degrees, *asynchronous, f"{int(row['seq_len']):,} tokens"]
    unit = next(size for name, size in MEMORY_UNITS.items() if row["framework"].startswith(name))
    why = _why_not(row)
    time, memory = (None, None) if why else _predicted(row)
    return Listed(
        source=row["source"],
        model=row["model"],
        layout=", ".join([*parts, row["precision"]]),
        measured=float(row["tokens_per_s_per_gpu"]),
        predicted=time,
        measured_bytes=float(row["peak_mem_gib"]) * unit if row["peak_mem_gib"] else None,
        predicted_bytes=memory,
        why=why or _assumed(row),
    )


def _why_not(row: dict[str, str]) -> str:
    reasons = []
    if _degree(row, "pp") > 1:
        reasons.append("pipeline parallelism")
    if "MoE" in row["model"]:
        reasons.append("mixtures of experts with context parallelism")
    if row["precision"] != "bf16":
        reasons.append("fp8")
    return f"not predicted: {' and '.join(reasons)}" if reasons else ""


def _assumed(row: dict[str, str]) -> str:
    """What a prediction leaves out, or takes for granted where the source is silent."""
    if row["async_tp"] == "True":
        return "collectives of tensor groups overlap in the run; predicted without"
    return "" if row["recompute"] else "recompute not stated; predicted with full recompute"


def _predicted(row: dict[str, str]) -> tuple[float, float]:
    """Tokens per second and device, and the peak of tensors."""
    gpus, seq_len = int(row["gpus"]), int(row["seq_len"])
    profile = shardwise.estimate(
        _model(row, seq_len),
        f"{gpus // 8}x8x{DEVICES[row['gpu']]}@{NETWORK}",
        Strategy.read(_strategy(row)),
        seq_len=seq_len,
    )
    assert profile.throughput is not None
    return (
        float(profile.throughput.tokens_per_s_per_device),
        float(profile.known_memory.peak_allocated_bytes),
    )


def _strategy(row: dict[str, str]) -> dict[str, Any]:
    return {
        "kind": "zero3",
        "tensor": _degree(row, "tp"),
        "context": _degree(row, "cp"),
        # What torch's context_parallel does, which both use.
        "context_method": "ring",
        "micro_batch": int(row["local_batch"]),
        "recompute": RECOMPUTE[row["recompute"] or "full"],
        "compile": row["compile"] == "True",
        "loss": "chunked" if row["loss"] else "plain",
    }


def _model(row: dict[str, str], seq_len: int) -> ModelSpec:
    """The preset, with positions for the sequence."""
    model = find_model(PRESETS[row["model"]])
    assert isinstance(model, ModelSpec)
    return model.model_copy(update={"max_positions": max(model.max_positions, seq_len)})
