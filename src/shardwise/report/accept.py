"""The screen of `shardwise doctor` without a run: progress, then one line per check."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from shardwise.report.screen import bullet, plain_console, plain_table, screen

if TYPE_CHECKING:
    from shardwise.trials.accept.line import Line
    from shardwise.trials.accept.result import Result

# What the lines of each check compare.
TITLES = {
    "parity": "parameters after 6 steps in fp64, difference from one unsharded device",
    "collectives": "calls and bytes of one step, predicted and counted",
    "memory": "peak of one step, predicted and measured; error of the prediction",
    "time": "layouts whose step is inside the predicted 90 % interval; error",
    "overlap": "profiler traces of all ranks",
    "overhead": "seconds per step; loops take turns in the same processes",
    "resume": "save, kill, resume: every byte of the checkpoint and every loss",
    "compile": "blocks under torch.compile",
}
# Column widths by title, the same for every check; 80 columns in total.
WIDTHS = {"": 7, "what": 28, "expected": 19, "seen": 18}
STYLES = {"ok": "green", "failed": "bold red", "not run": "yellow"}


class AcceptProgress:
    """Progress on stderr: the running check, and each line once it is known."""

    def __init__(self, checks: int, quiet: bool = False) -> None:
        self._out = plain_console(stderr=True)
        self._checks, self._quiet = checks, quiet
        self._begin = time.monotonic()
        self._number = 0

    def check(self, name: str) -> None:
        """Show that a check begins."""
        self._number += 1
        self._say(f"check {self._number} of {self._checks}: {name}")

    def step(self, what: str) -> None:
        """Show what the current check does."""
        self._say(f"  {what} …")

    def line(self, line: Line) -> None:
        """Show the verdict of a finished line."""
        self._say(f"  {line.verdict}: {line.what}")

    def _say(self, text: str) -> None:
        """Print a text with the elapsed minutes and seconds, unless quiet."""
        if not self._quiet:
            seconds = int(time.monotonic() - self._begin)
            self._out.print(f"{seconds // 60:>2}:{seconds % 60:02} {text}")


def print_result(result: Result, file: Path) -> None:
    """Print a table per check, the reasons of failed and skipped lines, and the verdict."""
    out = screen()
    out.print(Text(str(result.machine), style="bold"))
    for one in result.checked:
        out.print()
        about = TITLES.get(one.name, "")
        out.print(Text(one.name, style="bold") + Text(f"  {about}", style="dim"))
        table = plain_table()
        for title, width in WIDTHS.items():
            table.add_column(title, width=width)
        for line in one.lines:
            mark = Text(line.verdict, style=STYLES[line.verdict])
            table.add_row(mark, line.what, line.expected, line.seen)
        out.print(table)
    for verdict, title in (("failed", "Failed"), ("not run", "Not run")):
        _print_reasons(result, verdict, title)
    out.print()
    counts = f"{result.count('ok')} ok, {result.failed} failed, {result.count('not run')} not run"
    if result.stopped_by:
        out.print(Text(f"Stopped by {result.stopped_by}", style="yellow") + Text(f": {counts}."))
    elif result.passed:
        out.print(Text("Accepted", style="bold green") + Text(f": {counts}."))
    else:
        out.print(Text("Not accepted", style="bold red") + Text(f": {counts}."))
    minutes, seconds = divmod(int(result.seconds), 60)
    out.print(f"Measured in {minutes} min {seconds} s. Written to {file}.", style="dim")


def _print_reasons(result: Result, verdict: str, title: str) -> None:
    """Print the reasons of all lines with this verdict, each reason once per check."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for one in result.checked:
        for line in one.lines:
            if line.verdict == verdict:
                reasons.setdefault((one.name, line.reason), []).append(line.what)
    if not reasons:
        return
    out = screen()
    out.print()
    out.print(title, style="bold")
    for (check, reason), names in reasons.items():
        which = f" ({'; '.join(names)})" if names != [check] else ""
        bullet(out, f"{check}{which}: {reason}")
