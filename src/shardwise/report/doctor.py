"""The screen of `shardwise doctor`: one line per check, and the overall result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from shardwise.report.screen import plain_table, screen

if TYPE_CHECKING:
    from shardwise.trials.doctor.check import Check

_MARKS = {True: ("ok", "green"), False: ("FAIL", "bold red"), None: ("skip", "yellow")}


def print_checks(checks: Sequence[Check], processes: int) -> None:
    """Print one line per check and the overall result; `processes` ran the reduced model."""
    out = screen()
    table = plain_table()
    table.show_header = False
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for check in checks:
        mark, style = _MARKS[check.passed]
        table.add_row(Text(mark, style=style), check.name, check.detail)
    out.print(table)
    failed = [check for check in checks if check.passed is False]
    skipped = [check for check in checks if check.passed is None]
    out.print()
    if failed:
        out.print(Text(f"{len(failed)} of {len(checks)} checks failed.", style="bold red"))
        return
    passed = f"{len(checks) - len(skipped)} checks passed"
    how = f"reduced model, {processes} CPU process{'es' if processes > 1 else ''}"
    out.print(Text("Ready to train:", style="bold green") + Text(f" {passed} ({how})."))
