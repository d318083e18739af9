"""A table of what each number of hosts costs an elastic run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from shardwise.report.screen import bullet, screen, terminal_table
from shardwise.report.table import Column, Table
from shardwise.spec.quantity import show_count, show_gib, show_seconds
from shardwise.spec.run import RunSpec
from shardwise.trainer.sizes import Size

_COLUMNS = (
    Column("hosts", "hosts"),
    Column("accumulate", "micro-batches per rank"),
    Column("memory_bytes", "memory per rank", show_gib),
    Column("step_s", "step time", show_seconds),
    Column("tokens_per_s", "tokens/s", show_count),
)


def sizes_record(sizes: Sequence[Size]) -> list[dict[str, Any]]:
    """One JSON object per number of hosts; `problem` is None if the run can use it."""
    keys = [column.key for column in _COLUMNS]
    return [
        {**dict(zip(keys, _values(size), strict=True)), "problem": size.problem or None}
        for size in sizes
    ]


def print_sizes(run: RunSpec, sizes: Sequence[Size]) -> None:
    """Print a row per number of hosts, then why others cannot be used."""
    out = screen()
    batch = run.job.global_batch
    tokens = f", {batch:,} tokens per step" if batch is not None else ""
    least, most = sizes[-1].hosts, sizes[0].hosts
    hosts = f"{least} to {most} hosts" if least < most else f"{most} host{'s'[: most > 1]}"
    out.print(Text(run.model.name, style="bold") + f"{tokens} on {hosts}, predicted\n")
    table = Table(_COLUMNS)
    for size in sizes:
        if not size.problem:
            table.add(*_values(size))
    out.print(terminal_table(table))
    refused = [size for size in sizes if size.problem]
    if refused:
        out.print()
    for size in refused:
        bullet(out, str(size))


def _values(size: Size) -> list[int | float | None]:
    """Values of the columns for one number of hosts; None for what is unknown."""
    accumulate = None if size.problem else size.accumulate
    return [size.hosts, accumulate, size.memory_bytes, size.step_s, size.tokens_per_s]
