"""Predicted against published peak memory of the runs of 2024 to 2026.

They report what the allocator reserved. What a stack keeps that its rows do not state was read in
its code: data/evidence.csv.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from benchmarks.published_2026 import published, read_2026, read_row
from benchmarks.validation import Row
from shardwise.predict.estimate import most_tensor_bytes, reserved_interval
from shardwise.predict.memory import predict_memory
from shardwise.units.stage import Moment
from shardwise.units.unit import ModelUnits, Unit

GIB = 2**30
# prime-rl offloads the inputs of all blocks but the last five, and its loop of supervised training
# keeps the logits that the model returns beside those of the loss.
KEPT_ON_DEVICE = 5
KEPT_LOGIT_BYTES = 4.0
# FP8_ACT=1: the inputs of SwiGLU are kept in fp8, a byte per element less.
FP8_INPUTS = ("mlp-004", "mlp-009", "mlp-018", "mlp-027", "mlp-033", "mlp-037", "mlp-041")


class Judged(NamedTuple):
    """A run's reserved memory in GiB, as published and as predicted."""

    id: str
    source: str
    regime: str
    measured: float
    low: float
    high: float
    # Whether tensors alone were predicted not to fit the device.
    refused: bool

    @property
    def error(self) -> float:
        """Of the middle of the predicted interval."""
        return (self.low + self.high) / 2 / self.measured - 1


def judge(splits: Sequence[str]) -> list[Judged]:
    """The runs of these splits that publish their memory."""
    found = []
    for row in read_2026(splits)[0]:
        raw = published(row.id)
        if raw["peak_mem_gb"]:
            found.append(_judged(row, raw))
    return found


def _judged(row: Row, raw: dict[str, str]) -> Judged:
    units, columns = row.units, row.columns
    if row.software.name == "prime-rl-sft":
        units = _logits_kept(units)
    if row.software.stack == "megatron":
        # Its kernels of norms and SwiGLU keep their inputs alone, as compiled ones do.
        fused = read_row(raw, compile=True)
        units, columns = fused.units, fused.columns
    if row.id in FP8_INPUTS:
        units = _inputs_in_fp8(units)
    memory = predict_memory(units, columns)
    peak, pooled = (round(float(size[0])) for size in (memory.peak_bytes, memory.pooled_bytes))
    if raw["recompute"] == "offload":
        peak -= _offloaded(row)
    low, high = reserved_interval(peak, row.device, pooled, row.software.name)
    return Judged(
        row.id,
        row.source,
        row.regime,
        float(raw["peak_mem_gb"]),
        low / GIB,
        high / GIB,
        peak > most_tensor_bytes(row.device),
    )


def _logits_kept(units: ModelUnits) -> ModelUnits:
    def more(moment: Moment) -> Moment:
        size = KEPT_LOGIT_BYTES * units.root.stage.logits
        return moment._replace(logit_bytes=moment.logit_bytes + size)

    stage = units.root.stage
    stage = replace(
        stage,
        forward=tuple(more(moment) for moment in stage.forward),
        backward=tuple(more(moment) for moment in stage.backward),
    )
    return replace(units, root=replace(units.root, stage=stage))


def _inputs_in_fp8(units: ModelUnits) -> ModelUnits:
    """The units whose SwiGLU keeps gate and up in one byte instead of two.

    The block at work is left as it is.
    """
    made = {block: _input_in_fp8(block) for block in dict.fromkeys(units.blocks)}
    return replace(units, blocks=tuple(made[block] for block in units.blocks))


def _input_in_fp8(block: Unit) -> Unit:
    width = sum(
        p.shape[0] for p in block.parameters if p.name in ("mlp.gate.weight", "mlp.up.weight")
    )
    assert width
    kept = dict(block.stage.kept)
    whole = kept["none"]
    kept["none"] = whole._replace(activation_bytes=whole.activation_bytes - width)
    return replace(block, stage=replace(block.stage, kept=kept))


def _offloaded(row: Row) -> int:
    blocks = max(0, len(row.units.single_blocks) - KEPT_ON_DEVICE)
    tokens = row.strategy.micro_batch * row.units.seq_len / row.units.division.context
    return round(blocks * row.units.boundary_bytes * tokens)


def study(splits: Sequence[str]) -> dict[str, Any]:
    """Errors of all runs and by regime, and the share inside the predicted interval."""
    runs = judge(splits)
    regimes = sorted({run.regime for run in runs})
    return {
        **_summary(runs),
        "regimes": {
            name: _summary([run for run in runs if run.regime == name]) for name in regimes
        },
        "refused": [run.id for run in runs if run.refused],
        "rows_of": [{"id": run.id, "error": run.error} for run in runs],
    }


def _summary(runs: Sequence[Judged]) -> dict[str, float]:
    errors = np.asarray([run.error for run in runs])
    inside = [run.low <= run.measured <= run.high for run in runs]
    return {
        "rows": len(runs),
        "median_error": float(np.median(np.abs(errors))),
        "p90_error": float(np.quantile(np.abs(errors), 0.9)),
        "bias": float(np.median(errors)),
        "coverage90": float(np.mean(inside)),
    }
