"""Stacked bars for a terminal: memory by term, and step time by part.

Parts differ in fill as well as colour, so that a bar can be read in a file too.
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
# Ordered so that neighbouring fills differ most.
FILLS = "█▒▓░▚▪"
COLOURS = ("blue", "cyan", "green", "yellow", "magenta", "red")
FREE, MARK = "·", "|"
# Parts below this share of a bar are merged into "other".
MIN_SHARE = 0.02
_OTHER = "other"
# Below this many units of the legend, two decimals.
_SMALL = 10


class Part(NamedTuple):
    """A part of a bar: its name, its size, and its figure in the legend."""

    name: str
    size: float
    shown: str


def print_memory(out: Console, memory: MemoryProfile, bar: bool = True) -> None:
    """Print needed, total and usable memory of a device, with a bar of the terms."""
    needed, usable, capacity = memory.needed_bytes, memory.usable_bytes, memory.capacity_bytes
    assert needed is not None
    assert usable is not None
    assert capacity is not None
    limit = f"usable {show_memory(usable)}" + (f", at {MARK}" if bar else "")
    out.print(f"Memory: {show_memory(needed)} of {show_memory(capacity)} ({limit})")
    if bar:
        _print(out, memory_bar(memory, needed, usable, capacity))


def print_step(out: Console, sentence: str, time: TimeProfile, bar: bool = True) -> None:
    """Print `sentence`, then a bar of the step time by part."""
    paragraph(out, sentence)
    if bar:
        _print(out, step_bar(time))


def memory_bar(memory: MemoryProfile, needed: float, usable: float, capacity: float) -> list[Text]:
    """Lines of a bar and its legend: bytes by term and allocator overhead, of `capacity`.

    `needed`, `usable` and `capacity` are bytes per device; a mark shows `usable`.
    """
    _, factor = unit_of(needed)
    overhead = needed - memory.peak_allocated_bytes
    terms = {TERMS[term]: float(size) for term, size in memory.terms.items()}
    sizes = {**terms, "allocator overhead": float(overhead)} if overhead else terms
    # With one decimal, a part of a small total could read as 0.0.
    digits = 1 if needed >= _SMALL * factor else 2
    parts = _parts(sizes, needed, lambda size: f"{size / factor:,.{digits}f}")
    return [_bar(parts, max(needed, capacity), usable), *_legend(parts)]


def step_bar(time: TimeProfile) -> list[Text]:
    """Lines of a bar of one step by part, and its legend with shares of the step."""
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
    """The parts large enough to be drawn, in their order; the rest is merged into "other"."""
    kept = {name: size for name, size in sizes.items() if size >= MIN_SHARE * total}
    while kept and (len(kept) > len(FILLS) or (len(kept) == len(FILLS) and _rest(sizes, kept))):
        del kept[min(kept, key=lambda name: kept[name])]
    rest = _rest(sizes, kept)
    parts = {**kept, _OTHER: rest} if rest else kept
    return [Part(name, size, show(size)) for name, size in parts.items()]


def _rest(sizes: Mapping[str, float], kept: Mapping[str, float]) -> float:
    """The size of all parts that are not kept; 0 if it is too small to be drawn."""
    total = sum(sizes.values())
    rest = total - sum(kept.values())
    return rest if rest >= MIN_SHARE * total else 0.0


def _bar(parts: Iterable[Part], scale: float, mark: float | None = None) -> Text:
    """A line of `WIDTH` characters for sizes from 0 to `scale`, with a character at `mark`."""
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
    """Lines that name each fill with its part and figure."""
    lines = [Text()]
    for part, fill, colour in zip(parts, FILLS, COLOURS, strict=False):
        item = Text(fill, style=colour) + Text(f" {part.name} {part.shown}")
        _append(lines, item)
    return lines


def _append(lines: list[Text], item: Text) -> None:
    """Append an item to the last line if there is room, else as a new line."""
    gap = "  " if lines[-1] else ""
    if len(lines[-1]) + len(gap) + len(item) > WIDTH:
        lines.append(item)
    else:
        lines[-1] = lines[-1] + Text(gap) + item


def _print(out: Console, lines: Iterable[Text]) -> None:
    for line in lines:
        out.print(Text("  ") + line, soft_wrap=True)
