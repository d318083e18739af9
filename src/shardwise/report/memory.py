"""The screen of `shardwise memory`: peak, holder and remedy first, then the curve and the parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.observe.memory.advice import HEADROOM, verdict_of
from shardwise.observe.memory.record import Curve, Fragmentation, Holder, Memory
from shardwise.observe.memory.text import printable
from shardwise.report.screen import plain_table, screen
from shardwise.spec.quantity import show_gib

STEPS = "▁▂▃▄▅▆▇█"
_LABEL = 10
_PLACE = 38
_SOURCES = {
    "snapshot": "allocator events",
    "timeline": "events of torch.profiler",
    "run": "changes in one step of the run",
}


def print_memory(
    memories: Sequence[Memory],
    top: int,
    capacity: int | None = None,
    console: Console | None = None,
    headroom: float = HEADROOM,
) -> None:
    """One screen for each file: its fullest device in whole, the others in a line."""
    out = screen(console)
    files: dict[object, list[Memory]] = {}
    for memory in memories:
        files.setdefault(memory.path, []).append(memory)
    for number, (path, devices) in enumerate(files.items()):
        if number:
            out.print()
        if len(files) > 1:
            out.print(f"== {path}", style="bold")
        fullest = max(devices, key=lambda one: one.peak.allocated_bytes)
        _print_device(out, fullest, top, capacity, headroom)
        for other in devices:
            if other is not fullest:
                out.print(
                    f"Device {other.device}: peak {show_gib(other.peak.allocated_bytes)}; "
                    f"--device {other.device} shows it."
                )


def _print_device(
    out: Console, memory: Memory, top: int, capacity: int | None, headroom: float
) -> None:
    verdict = verdict_of(memory, capacity, headroom)
    out.print(Text(verdict.peak, style="bold"))
    out.print(verdict.holder)
    out.print(verdict.change, style="green" if verdict.cause == "none" else "yellow")
    out.print()
    _print_curve(out, memory)
    out.print()
    out.print(_categories(memory))
    if memory.holders:
        out.print()
        out.print(_holders(memory, top))
        if len(memory.holders) > top:
            rest = memory.holders[top:]
            out.print(
                f"and {len(rest):,} more with {show_gib(sum(one.bytes for one in rest))}",
                style="dim",
            )
    out.print()
    if memory.fragmentation is not None:
        for sentence in _fragmentation(memory.fragmentation):
            out.print(sentence)
    out.print(_leak(memory))
    for problem in memory.problems:
        out.print(f"{memory.path.name}: {problem}.", style="yellow")


def sparkline(levels: Sequence[int], highest: int, width: int) -> str:
    """At most `width` characters, each the highest level of its share of the events."""
    count = min(width, len(levels))
    shown = []
    for column in range(count):
        start, end = column * len(levels) // count, (column + 1) * len(levels) // count
        level = max(levels[start:end])
        # Nothing at all is a gap; the least that is something is seen.
        rank = -(-level * len(STEPS) // highest) if highest else 0
        shown.append(STEPS[rank - 1] if rank else " ")
    return "".join(shown)


def _print_curve(out: Console, memory: Memory) -> None:
    curve, peak = memory.curve, memory.peak
    width = out.width - _LABEL
    highest = max(curve.allocated + (curve.reserved or []))
    out.print(Text("allocated ") + Text(sparkline(curve.allocated, highest, width), style="cyan"))
    if curve.reserved is not None:
        out.print(Text("reserved  ") + Text(sparkline(curve.reserved, highest, width), style="dim"))
    columns = min(width, len(curve.allocated))
    # The column whose share of the events holds the peak.
    at = ((peak.event + 1) * columns - 1) // len(curve.allocated)
    events = f"event {peak.event:,} of {peak.events:,}"
    label = f"peak: {events}{_seconds(curve)}"
    device = "" if memory.device is None else f" of device {memory.device}"
    indent = _LABEL + at
    if indent + 2 + len(label) <= out.width:
        line = " " * indent + "^ " + label
    else:
        line = " " * max(0, indent - 1 - len(label)) + label + " ^"
    out.print(line, style="dim", no_wrap=True, overflow="crop")
    out.print(
        f"Left to right: {_SOURCES[memory.source]}{device}; full height is {show_gib(highest)}.",
        style="dim",
    )


def _seconds(curve: Curve) -> str:
    if curve.seconds is None:
        return ""
    if curve.seconds >= 1:
        return f", {curve.seconds:,.2f} s in all"
    return f", {curve.seconds * 1e3:,.2f} ms in all"


def _categories(memory: Memory) -> Table:
    table = plain_table()
    table.add_column("kind", no_wrap=True)
    table.add_column("at the peak", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("known by")
    for share in memory.categories:
        table.add_row(
            share.category.replace("_", " ")[:24],
            show_gib(share.bytes),
            _percent(share.bytes, memory),
            Text(share.evidence, style="dim"),
        )
    return table


def _holders(memory: Memory, top: int) -> Table:
    table = plain_table()
    table.add_column("holder", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for column in ("bytes", "share", "pieces"):
        table.add_column(column, justify="right", no_wrap=True)
    for holder in memory.holders[:top]:
        table.add_row(
            _place(holder),
            holder.category,
            show_gib(holder.bytes),
            _percent(holder.bytes, memory),
            f"{holder.allocations:,}",
        )
    return table


def _place(holder: Holder) -> str:
    """File, line and function; where that is too long, the end of it."""
    whole = holder.place
    if holder.file is not None and PurePosixPath(holder.file).name == "__init__.py":
        whole = f"{PurePosixPath(holder.file).parent.name}/{whole}"
    return printable(whole, _PLACE)


def _percent(size: int, memory: Memory) -> str:
    peak = memory.peak.allocated_bytes
    return f"{size / peak:.1%}" if peak else "-"


def _fragmentation(found: Fragmentation) -> list[str]:
    parts = {
        "allocated": found.allocated_bytes,
        "waiting for a stream": found.awaiting_bytes,
        "free in whole segments": found.cached_bytes,
        "free in pieces of used segments": found.split_bytes,
    }
    told = ", ".join(f"{show_gib(size)} {what}" for what, size in parts.items() if size)
    at_peak = (
        "unknown" if found.unused_at_peak_bytes is None else show_gib(found.unused_at_peak_bytes)
    )
    rounding = f"; rounding takes {show_gib(found.rounding_bytes)}" if found.rounding_bytes else ""
    return [
        f"Unused of what was reserved at the peak: {at_peak}.",
        f"At the end: {show_gib(found.reserved_bytes)} reserved in {found.segments:,} segments: "
        f"{told or 'nothing in them'}{rounding}.",
        f"Largest free block: {show_gib(found.largest_free_bytes)}. Requests up to "
        f"{show_gib(found.largest_request_bytes)} need no new segment.",
        f"Out of memory: {_times(found.out_of_memory)}. Segments given back to try again: "
        f"{_times(found.retries)}.",
    ]


def _times(number: int) -> str:
    return {0: "never", 1: "once"}.get(number, f"{number:,} times")


def _leak(memory: Memory) -> str:
    leak = memory.leak
    if leak.found and leak.bytes_per_step is not None:
        return f"Leak: {show_gib(leak.bytes_per_step)} per step at {leak.place}; {leak.why}."
    return f"Leak: {leak.why}."
