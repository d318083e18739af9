"""Sharding and expert parallelism together, on two hosts of two ranks behind limited links.

An expert group lies inside a host or spans both. Few tokens favour layouts that send tokens, many
favour those that gather experts. Routers are trained with an auxiliary loss over all ranks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.lab import layouts_results
from benchmarks.lab.cases import load
from benchmarks.lab.layouts import Cell, Layouts
from benchmarks.lab.network import LONG_QUEUE_S
from shardwise.observe.observation import units_of

# A mixture as Qwen3's, with most of its parameters in experts.
MIXTURE = {
    "family": "qwen3_moe",
    "layers": 2,
    "hidden": 256,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 64,
    "experts": 16,
    "experts_per_token": 4,
    "vocab": 1024,
}
INSIDE, ACROSS = "zero3, experts inside", "zero3, experts across"
EXPERT = Layouts(
    name="expert",
    model=MIXTURE,
    layouts={
        "zero3": {"kind": "zero3"},
        "hybrid": {"kind": "zero3", "shard": 2, "replicate": 2},
        INSIDE: {"kind": "zero3", "expert": 2},
        ACROSS: {"kind": "zero3", "expert": 4},
        "hybrid, experts inside": {"kind": "zero3", "shard": 2, "replicate": 2, "expert": 2},
    },
    rates=(100e6, 200e6, 400e6),
    batches=(8, 24),
    # Chosen before anything was measured: every layout but one, all rates, both batches.
    fitted=(
        Cell(200e6, "zero3", 8),
        Cell(400e6, "zero3", 24),
        Cell(100e6, "hybrid", 24),
        Cell(400e6, INSIDE, 8),
        Cell(100e6, ACROSS, 8),
        Cell(200e6, ACROSS, 24),
    ),
    train={"balance_loss": "global", "learning_rate": 1e-5},
    plain=3,
    queue_s=LONG_QUEUE_S,
    patience_s=60.0,
)
SECTION = Path(__file__).parent / "expert.md"


def measure() -> Mapping[str, Any]:
    EXPERT.measure()
    return evaluate()


def evaluate() -> dict[str, Any]:
    """Errors and rankings, and step times with experts divided over both hosts relative to zero3.

    Also the share of the machine that other processes used while cells were trained.
    """
    result = layouts_results.evaluate(EXPERT)
    cases = (load(EXPERT.name) or {})["cases"].values()
    others = [case["others_share"] for case in cases]
    return {
        **result,
        "across": layouts_results.ratios(result, ACROSS, "zero3"),
        "others": max(others),
        "usual_others": statistics.median(others),
    }


def show(result: Mapping[str, Any]) -> None:
    layouts_results.show(result)
    for where, ratio in result["across"].items():
        print(
            f"  {where} sequences: experts across hosts take {ratio['predicted']:.2f} times the "
            f"step of zero3 (predicted), {ratio['measured']:.2f} (measured)"
        )
    print(f"other processes used up to {result['others']:.0%} of the machine")


def section(result: Mapping[str, Any]) -> str:
    """The page's section on expert parallelism."""
    wins = {
        (kind, batch): sum(
            ratio[kind] < 1
            for where, ratio in result["across"].items()
            if where.endswith(f", {batch}")
        )
        for kind in ("measured", "predicted")
        for batch in EXPERT.batches
    }
    few, many = EXPERT.batches
    by_rate = ", ".join(
        f"{rate / 1e6:,.0f} Mbit/s: {share:.0%}"
        for rate, share in result["ranking_by_rate"].items()
    )
    return (
        SECTION.read_text()
        .strip()
        .format(
            **layouts_results.words(EXPERT, result),
            parameters=units_of(EXPERT.case(EXPERT.cells[0]).run()).parameters / 1e6,
            rates=len(EXPERT.rates),
            few=few,
            many=many,
            wins_few=wins["measured", few],
            wins_many=wins["measured", many],
            predicted_wins_few=wins["predicted", few],
            predicted_wins_many=wins["predicted", many],
            by_rate=by_rate,
        )
    )
