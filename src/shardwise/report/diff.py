"""The screen of `shardwise trace --against`: result, parts of a step, then kernels."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from shardwise.observe.diff import Diff, KernelTiming, StepPart
from shardwise.report.screen import plain_table, screen
from shardwise.step.words import MILLISECOND, signed_percent

PARTS: dict[StepPart, str] = {
    "data_loading": "waiting for data",
    "allocator": "waiting for the allocator",
    "rate_limiter": "waiting for FSDP's rate limiter",
    "synchronisation": "idle after the host waited",
    "launch_bound": "waiting for kernel launches",
    "unexplained_idle": "idle, reason unknown",
    "exposed_communication": "exposed communication",
    "exposed_copies": "exposed copies",
    "compute": "compute",
}
_COLOURS = {"added": "yellow", "removed": "cyan", "slower": "red", "faster": "green"}


def print_diff(diff: Diff, top: int) -> None:
    """Print the result, then the `top` largest changes."""
    out = screen()
    ratio = diff.after.step_ns / diff.before.step_ns - 1 if diff.before.step_ns else 0.0
    change = f"{_time(diff.before)} per step before, {_time(diff.after)} after"
    result = "Regression" if diff.regressed else "No regression"
    style = "bold red" if diff.regressed else "bold"
    out.print(Text(f"{result}: {change} ({signed_percent(ratio, 1)}).", style=style))
    _print_parts(out, diff)
    changed = [d for d in diff.differences if d.change != "same"]
    if not changed:
        out.print("No kernel changed beyond noise.")
        return
    table = plain_table()
    table.add_column("", no_wrap=True)
    table.add_column("kernel or operation", no_wrap=True, max_width=34, overflow="ellipsis")
    for column in ("calls", "before", "after", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in changed[:top]:
        table.add_row(
            Text(one.change, style=_COLOURS[one.change]),
            one.name,
            _calls(one.before.calls, one.after.calls),
            f"{one.before.step_ns / MILLISECOND:,.2f}",
            f"{one.after.step_ns / MILLISECOND:,.2f}",
            f"{one.delta_ns / MILLISECOND:+z,.2f}",
        )
    out.print()
    out.print(table)
    more = f" {len(changed) - top:,} more changed." if len(changed) > top else ""
    same = len(diff.differences) - len(changed)
    unchanged = f" {same:,} did not change beyond noise." if same else ""
    out.print(f"Milliseconds and calls per step (median).{more}{unchanged}", style="dim")


def _print_parts(out: Console, diff: Diff) -> None:
    """Print the parts of the average step that changed beyond noise, the largest first."""
    changed = [part for part in diff.parts if part.changed]
    if not changed:
        return
    first = changed[0]
    change = f"{first.delta_ns / MILLISECOND:+z,.1f} ms per step"
    out.print(f"Largest difference: {PARTS[first.part]}, {change}.")
    table = plain_table()
    table.add_column("part of a step", no_wrap=True)
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    for part in changed:
        cells = (part.before_ns, part.after_ns)
        table.add_row(
            PARTS[part.part],
            *(f"{cell / MILLISECOND:,.2f}" for cell in cells),
            f"{part.delta_ns / MILLISECOND:+z,.2f}",
        )
    out.print()
    out.print(table)
    out.print("Milliseconds per step (average).", style="dim")


def _time(side: KernelTiming) -> str:
    """Milliseconds per step with their spread."""
    spread = f" ± {side.spread_ns / MILLISECOND:,.1f}" if side.spread_ns else ""
    return f"{side.step_ns / MILLISECOND:,.1f}{spread} ms"


def _calls(before: float, after: float) -> str:
    """Calls per step, as "before → after" if they differ."""
    return f"{before:,.0f}" if before == after else f"{before:,.0f} → {after:,.0f}"
