"""Sharding and tensor parallelism together, on two hosts of two ranks behind limited links.

A tensor group lies inside a host or has one rank on each.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.lab import layouts_results
from benchmarks.lab.cases import MODEL
from benchmarks.lab.layouts import Cell, Layouts

INSIDE, ACROSS = "zero3, tensor inside", "zero3, tensor across"
TENSOR = Layouts(
    name="tensor",
    # A small vocabulary, so that most of the model is in its blocks.
    model={**MODEL, "vocab": 1024},
    layouts={
        "zero3": {"kind": "zero3"},
        "hybrid": {"kind": "zero3", "shard": 2, "replicate": 2},
        INSIDE: {"kind": "zero3", "tensor": 2},
        ACROSS: {"kind": "zero3", "tensor": 2, "tensor_across_nodes": True},
        "zero2, tensor inside": {"kind": "zero2", "tensor": 2},
    },
    rates=(250e6, 500e6, 1e9),
    batches=(16, 32),
    # Chosen before anything was measured: every layout but one, all rates, both batches.
    fitted=(
        Cell(500e6, "zero3", 32),
        Cell(250e6, "hybrid", 16),
        Cell(1e9, INSIDE, 16),
        Cell(250e6, INSIDE, 32),
        Cell(500e6, ACROSS, 16),
        Cell(1e9, ACROSS, 32),
    ),
)
SECTION = Path(__file__).parent / "tensor.md"


def measure() -> Mapping[str, Any]:
    TENSOR.measure()
    return evaluate()


def evaluate() -> dict[str, Any]:
    """Errors and rankings, and step times with tensor groups across hosts relative to inside."""
    result = layouts_results.evaluate(TENSOR)
    return {**result, "across": layouts_results.ratios(result, ACROSS, INSIDE)}


def show(result: Mapping[str, Any]) -> None:
    layouts_results.show(result)
    for where, ratio in result["across"].items():
        print(
            f"  {where} sequences: tensor across hosts takes {ratio['predicted']:.2f} times the "
            f"step of inside (predicted), {ratio['measured']:.2f} (measured)"
        )


def section(result: Mapping[str, Any]) -> str:
    """The page's section on tensor parallelism."""
    ratios = list(result["across"].values())
    return (
        SECTION.read_text()
        .strip()
        .format(
            **layouts_results.words(TENSOR, result),
            losses=sum(ratio["measured"] > 1 for ratio in ratios),
            predicted_losses=sum(ratio["predicted"] > 1 for ratio in ratios),
            ratios=len(ratios),
            most=max(ratio["measured"] for ratio in ratios),
            most_predicted=max(ratio["predicted"] for ratio in ratios),
        )
    )
