"""Stacked bars for a terminal: what memory holds, and where the time of a step goes.

Parts are told apart by their fill, so that a bar reads without colour, in a file as on a screen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

from shardwise.report.screen import paragraph
from shardwise.step.memory_words import show_memory, unit_of
from shardwise.step.profile import MemoryProfile, TimeProfile
from shardwise.step.words import TERMS, percent

WIDTH = 76
# Neighbours differ most.
FILLS = "█▒▓░▚▪"
COLOURS = ("blue", "cyan", "green", "yellow", "magenta", "red")
FREE, MARK = "·", "|"
# Smaller shares of a bar have no part of their own.
MIN_SHARE = 0.02
_OTHER = "other"
# Of the unit of a legend.
_SMALL = 10


class Part(NamedTuple):
    """A part of a bar: its name, its size, and the figure of the legend."""

    name: str
    size: float
    shown: str


def print_memory(out: Console, memory: MemoryProfile, bar: bool = True) -> None:
    """What is needed of a device and what is usable, as a sentence and as a bar."""
    needed, usable, capacity = memory.needed_bytes, memory.usable_bytes, memory.capacity_bytes
    assert needed is not None
    assert usable is not None
    assert capacity is not None
    limit = f"usable {show_memory(usable)}" + (f", at {MARK}" if bar else "")
    out.print(f"Memory: {show_memory(needed)} of {show_memory(capacity)} ({limit})")
    if bar:
        _print(out, memory_bar(memory, needed, usable, capacity))


def print_step(out: Console, sentence: str, time: TimeProfile, bar: bool = True) -> None:
    """A sentence about a step, and the parts of its time as a bar."""
    paragraph(out, sentence)
    if bar:
        _print(out, step_bar(time))


def memory_bar(memory: MemoryProfile, needed: float, usable: float, capacity: float) -> list[Text]:
    """The terms at the peak and the allocator overhead, against what a device has and can give."""
    _, factor = unit_of(needed)
    overhead = needed - memory.peak_allocated_bytes
    terms = {TERMS[term]: float(size) for term, size in memory.terms.items()}
    sizes = {**terms, "allocator overhead": float(overhead)} if overhead else terms
    # A part of a small sum would read as nothing.
    digits = 1 if needed >= _SMALL * factor else 2
    parts = _parts(sizes, needed, lambda size: f"{size / factor:,.{digits}f}")
    return [_bar(parts, max(needed, capacity), usable), *_legend(parts)]


def step_bar(time: TimeProfile) -> list[Text]:
    """Compute, and what no compute hides."""
    sizes = {
        "compute": time.compute_s,
        "exposed communication": time.exposed_communication_s,
        "copies": time.exposed_copy_s,
        # With what the host does once per step, while devices wait.
        "optimizer and host": time.optimizer_s,
    }
    parts = [
        Part(name, size, percent(size / time.step_s))
        for name, size in sizes.items()
        if size is not None and size / time.step_s >= 0.005
    ]
    return [_bar(parts, time.step_s), *_legend(parts)]


def _parts(sizes: Mapping[str, float], total: float, show: Callable[[float], str]) -> list[Part]:
    """The parts that can be seen, in their order; the others are one."""
    kept = {name: size for name, size in sizes.items() if size >= MIN_SHARE * total}
    while kept and (len(kept) > len(FILLS) or (len(kept) == len(FILLS) and _rest(sizes, kept))):
        del kept[min(kept, key=lambda name: kept[name])]
    rest = _rest(sizes, kept)
    parts = {**kept, _OTHER: rest} if rest else kept
    return [Part(name, size, show(size)) for name, size in parts.items()]


def _rest(sizes: Mapping[str, float], kept: Mapping[str, float]) -> float:
    """What has no part of its own; 0 where it could not be seen."""
    total = sum(sizes.values())
    rest = total - sum(kept.values())
    return rest if rest >= MIN_SHARE * total else 0.0


def _bar(parts: Iterable[Part], scale: float, mark: float | None = None) -> Text:
    """The parts on a scale of `WIDTH` characters, with a mark on it."""
    text, end = Text(), 0.0
    for part, fill, colour in zip(parts, FILLS, COLOURS, strict=False):
        end += part.size
        text.append(fill * (round(WIDTH * end / scale) - len(text)), style=colour)
    text.append(FREE * (WIDTH - len(text)), style="dim")
    if mark is None:
        return text
    at = min(WIDTH - 1, round(WIDTH * mark / scale))
    return text[:at] + Text(MARK, style="bold") + text[at + 1 :]


def _legend(parts: Iterable[Part]) -> list[Text]:
    """What each fill is, in lines."""
    lines = [Text()]
    for part, fill, colour in zip(parts, FILLS, COLOURS, strict=False):
        item = Text(fill, style=colour) + Text(f" {part.name} {part.shown}")
        _append(lines, item)
    return lines


def _append(lines: list[Text], item: Text) -> None:
    """Put an item into the last line if it has room, else into a new one."""
    gap = "  " if lines[-1] else ""
    if len(lines[-1]) + len(gap) + len(item) > WIDTH:
        lines.append(item)
    else:
        lines[-1] = lines[-1] + Text(gap) + item


def _print(out: Console, lines: Iterable[Text]) -> None:
    for line in lines:
        out.print(Text("  ") + line, soft_wrap=True)
