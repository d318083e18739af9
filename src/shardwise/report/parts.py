"""The parts of a step whose devices, or their shares of it, differ, as a table."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from shardwise.report.screen import plain_table
from shardwise.spec.quantity import show_gib, show_seconds
from shardwise.step.profile import PartProfile


def parts_table(parts: Sequence[PartProfile]) -> Table:
    """Table of what each part does in a step, how long it waits, and the memory it needs."""
    table = plain_table()
    table.add_column("Part", no_wrap=True)
    for title in ("micro-batches", "busy", "waits", "needs", "usable"):
        table.add_column(title, justify="right", no_wrap=True)
    for part in parts:
        memory = part.memory
        table.add_row(
            f"{part.devices} x {part.device}",
            str(part.accumulate),
            "" if part.step_s is None else show_seconds(part.step_s),
            "" if part.waiting_s is None else show_seconds(part.waiting_s),
            show_gib(memory.needed_bytes or memory.peak_allocated_bytes),
            "" if memory.usable_bytes is None else show_gib(memory.usable_bytes),
        )
    return table
