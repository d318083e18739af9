"""The screen of `shardwise diff`."""

from __future__ import annotations

from rich.text import Text

from shardwise.observe.diff import Diff, Side
from shardwise.report.screen import plain_table, screen
from shardwise.report.words import MILLISECOND

_COLOURS = {"added": "yellow", "removed": "cyan", "slower": "red", "faster": "green"}


def print_diff(diff: Diff, top: int) -> None:
    """The verdict first, then what changed most."""
    out = screen()
    ratio = diff.after.step_ns / diff.before.step_ns - 1 if diff.before.step_ns else 0.0
    told = f"A step takes {_time(diff.after)} instead of {_time(diff.before)} ({ratio:+.1%})"
    if diff.regressed:
        out.print(Text(f"Slower beyond noise. {told}.", style="bold red"))
    else:
        out.print(Text(f"No regression. {told}.", style="bold"))
    changed = [d for d in diff.differences if d.change != "same"]
    if not changed:
        out.print("No kind of work differs beyond noise.")
        return
    table = plain_table()
    table.add_column("what", no_wrap=True)
    table.add_column("name", no_wrap=True, max_width=34, overflow="ellipsis")
    for column in ("calls", "before", "after", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    for one in changed[:top]:
        table.add_row(
            Text(one.change, style=_COLOURS[one.change]),
            one.name,
            _calls(one.before.calls, one.after.calls),
            f"{one.before.step_ns / MILLISECOND:,.2f}",
            f"{one.after.step_ns / MILLISECOND:,.2f}",
            f"{one.delta_ns / MILLISECOND:+,.2f} ms",
        )
    out.print()
    out.print(table)
    rest = f" {len(changed) - top} more changed." if len(changed) > top else ""
    same = len(diff.differences) - len(changed)
    out.print(f"Milliseconds of a step, median over steps.{rest} {same} are the same.", style="dim")


def _time(side: Side) -> str:
    spread = f" ± {side.spread_ns / MILLISECOND:,.1f}" if side.spread_ns else ""
    return f"{side.step_ns / MILLISECOND:,.1f}{spread} ms"


def _calls(before: float, after: float) -> str:
    return f"{before:,.0f}" if before == after else f"{before:,.0f} > {after:,.0f}"
