"""The screen of `shardwise export`: figures in the stack, unsupported settings, start command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text

from shardwise.report.screen import screen, terminal_table
from shardwise.report.table import Cell, Column, Table
from shardwise.spec.quantity import show_seconds, show_whole
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy_words import run_words
from shardwise.stacks.write.differences import changed_fields
from shardwise.stacks.write.exported import Exported
from shardwise.step.memory_words import shortfall_words, show_memory
from shardwise.step.profile import StepProfile

# Title, key and writer of the figures of the table.
_FIGURES: tuple[tuple[str, str, Callable[[float], str]], ...] = (
    ("memory", "needed_bytes", show_memory),
    ("usable memory", "usable_bytes", show_memory),
    ("step time", "step_s", show_seconds),
    ("tokens/s", "tokens_per_s", show_whole),
)


class Figures(NamedTuple):
    """Predicted steps of a run: `run` as planned, `stack` as the other stack runs it."""

    run: StepProfile
    stack: StepProfile

    def to_dict(self) -> dict[str, Any]:
        """Both sets of figures as a JSON object; keys name the units."""
        return {"run": _figures(self.run), "stack": _figures(self.stack)}


def exported_dict(written: Exported, run: RunSpec, figures: Figures | None) -> dict[str, Any]:
    """An export as a JSON object: the file, changed settings, and predicted figures."""
    changed = changed_fields(run.strategy, written.applied)
    return {
        "schema": 1,
        **written.to_dict(),
        "changed": {
            name: {"run": value, "stack": getattr(written.applied, name)}
            for name, value in changed.items()
        },
        "predicted": figures.to_dict() if figures else None,
    }


def print_exported(
    written: Exported,
    run: RunSpec,
    figures: Figures | None,
    stack: str,
    file: str | None,
    edited: bool = False,
    *,
    console: Console | None = None,
) -> None:
    """Print figures in the stack, unsupported settings and the start command.

    At most 80 columns wide. `file` is the written file; None if it went to standard output. Of a
    file of the user's that is to be `edited`, the data and the start are the user's own.
    """
    out = screen(console)
    if file is not None:
        out.print(f"Written to {file}.")
    if figures is not None:
        _print_figures(out, written, run, figures, stack)
    for title, sentences in (
        (f"Not expressible in {stack}:", written.unsupported),
        ("Set in your script:", () if edited else written.in_script),
    ):
        if sentences:
            out.print()
            out.print(title, style="bold")
            for sentence in sentences:
                _print_item(out, sentence)
    if edited:
        return
    out.print()
    # A command is copied; it must not be broken into lines.
    out.print(Text(f"Start: {written.command}"), soft_wrap=True)


def _print_item(out: Console, sentence: str) -> None:
    """Print a sentence as an indented bullet, wrapped between words."""
    from rich.padding import Padding

    lines = Text(sentence).wrap(out, out.width - 4)
    for index, line in enumerate(lines):
        line.rstrip()
        out.print(Padding(Text("- " if index == 0 else "  ") + line, (0, 0, 0, 2), expand=False))


def _print_figures(
    out: Console, written: Exported, run: RunSpec, figures: Figures, stack: str
) -> None:
    """Print memory, step time and tokens/s as planned and as the stack runs it."""
    there = run._replace(strategy=written.applied)
    planned, runs = _figures(figures.run), _figures(figures.stack)
    rows = [(title, key, show) for title, key, show in _FIGURES if runs[key] is not None]
    # Differences that the table does not show are none to act on.
    alike = all(show(planned[key]) == show(runs[key]) for _, key, show in rows)
    same = alike and not changed_fields(run.strategy, written.applied)
    out.print(f"As {stack} runs it: {run_words(there)}.")
    columns = [Column("figure", "predicted", left=True)]
    columns += [] if same else [Column("run", "as planned")]
    columns += [Column("stack", f"in {stack}")]
    table = Table(columns)
    for title, key, show in rows:
        cells = [runs] if same else [planned, runs]
        table.add(title, *(Cell(cell[key], show(cell[key])) for cell in cells))
    if table.rows:
        out.print(terminal_table(table))
    memory = figures.stack.known_memory
    advice = f"Try: shardwise plan --for {stack}, which searches what {stack} can run."
    if (
        memory.verdict in ("at risk", "does not fit")
        and memory.needed_bytes
        and memory.usable_bytes
    ):
        verdict = "Does not fit" if memory.verdict == "does not fit" else "At risk"
        short = shortfall_words(memory.needed_bytes, memory.usable_bytes)
        out.print(f"{verdict} as {stack} runs it: {short}. {advice}")
    elif not same:
        out.print(advice)


def _figures(profile: StepProfile) -> dict[str, Any]:
    """Needed and usable bytes, verdict, seconds per step and tokens/s of a profile."""
    memory, time, throughput = profile.known_memory, profile.time, profile.throughput
    return {
        "needed_bytes": memory.needed_bytes,
        "usable_bytes": memory.usable_bytes,
        "verdict": memory.verdict,
        "step_s": time.step_s if time else None,
        "tokens_per_s": throughput.tokens_per_s if throughput else None,
    }
