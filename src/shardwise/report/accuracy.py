"""Prediction errors by device, and how many independent runs and sources they come from."""

from __future__ import annotations

from typing import Any

from shardwise.report.screen import screen, terminal_table
from shardwise.report.table import Column, Table
from shardwise.spec import catalogue


def _share(value: float) -> str:
    """A share from 0 to 1 as a percentage."""
    return f"{100 * value:.1f} %"


# Keys of an entry, and the predicted quantity that each key has errors of.
_PARTS = {"time": "tokens/s", "memory": "peak memory"}
COLUMNS = (
    Column("device", "device", left=True),
    Column("evidence", "evidence", left=True),
    Column("predicted", "predicted", left=True),
    Column("runs", "runs"),
    Column("sources", "sources"),
    Column("median_error", "median error", _share),
    Column("p90_error", "90th percentile", _share),
)


def accuracy_entries(device: str | None) -> list[dict[str, Any]]:
    """Prediction errors of all devices, or of one; SpecError for an unknown device."""
    found = catalogue.accuracy()
    if device is None:
        return found
    name = catalogue.find_device(device).name
    return [entry for entry in found if entry["device"] == name]


def accuracy_table(found: list[dict[str, Any]]) -> Table:
    """One row per device, kind of evidence and quantity."""
    table = Table(COLUMNS)
    for entry in found:
        for part, predicted in _PARTS.items():
            if part in entry:
                figures = (entry[part][column.key] for column in COLUMNS[3:])
                table.add(entry["device"], entry["evidence"], predicted, *figures)
    return table


def print_accuracy(found: list[dict[str, Any]], device: str | None) -> None:
    """Print the table of errors and what its terms mean; say so if nothing was measured."""
    out = screen()
    if not found:
        name = catalogue.find_device(device).name if device else "any device"
        out.print(
            f"No measured run on {name} yet. Predictions use the coefficients of the nearest "
            "device that has some; 'shardwise calibrate' measures yours."
        )
        return
    out.print(terminal_table(accuracy_table(found), gap=1))
    out.print(
        "\nErrors on runs that no coefficient was fitted to. Published: runs of other projects, "
        "each one source. Contributed: runs of Shardwise ('shardwise contribute'). Devices "
        "that are not listed have no measured run.",
        style="dim",
    )
