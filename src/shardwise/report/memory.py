"""The screen of `shardwise memory`: peak, largest owner and suggested fix, then the details."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePosixPath

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardwise.observe.memory.analysis import MemoryAnalysis
from shardwise.observe.memory.record import Curve, Fragmentation, Holder, Memory, Peak, StepSource
from shardwise.observe.memory.verdict import (
    HEADROOM,
    Cause,
    MemoryVerdict,
    loss_dominates,
    one_owner_dominates,
    verdict_of,
)
from shardwise.report.screen import plain_table, screen, text_of
from shardwise.spec.foreign_text import cut
from shardwise.spec.quantity import show_gib
from shardwise.step.words import percent

LEVELS = "▁▂▃▄▅▆▇█"
_NAMED = "named by the recording"
_LABEL_WIDTH = 10
_PLACE_WIDTH = 38
_SOURCES = {
    "snapshot": "allocator events",
    "timeline": "events of torch.profiler",
    "run": "changes during one step",
}
# How each kind of memory is recognised, by source.
_KINDS = {
    "snapshot": {
        "parameters": "allocated while a module was built, moved or loaded",
        "gradients": "allocated in the backward, live after it",
        "optimizer": "allocated in torch.optim",
        "forward": "allocated in a module's forward or a loss",
        "backward": "allocated and freed in the backward",
        "collectives": "allocated in torch.distributed",
        "unknown": "the stack shows none of the above",
        "not recorded": "allocated before the recording",
    },
    "run": {
        "parameters": "sharded parameters of the model",
        "optimizer": "optimizer states",
        "gradients": "reduced gradients",
        "unsharded_parameters": "outputs of all-gathers",
        "reduce_buffers": "inputs of reductions",
        "working": "activations, gradients not reduced yet, everything else",
    },
}
_STEPS: dict[StepSource, str] = {
    "annotations": "marked by annotations",
    "metadata": "marked by memory metadata",
    "optimizer": "marked by the optimizer",
    "recurrence": "recognised by recurring allocations",
    "measured_step": "measured",
}


def print_memory(
    memories: Sequence[Memory],
    top: int,
    capacity: int | None = None,
    console: Console | None = None,
    headroom: float = HEADROOM,
) -> None:
    """Print a screen per file: the device with the highest peak, the others in a line each."""
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
                    f"Device {other.device}: peak {show_gib(other.peak.allocated_bytes)} (details: "
                    f"--device {other.device})."
                )


def memory_text(found: MemoryAnalysis, top: int = 10) -> str:
    """The screen of `shardwise memory` as text of 80 columns, without colours."""
    return text_of(
        lambda console: print_memory(
            found.memories, top, found.capacity_bytes, console, found.headroom
        )
    )


def _print_device(
    out: Console, memory: Memory, top: int, capacity: int | None, headroom: float
) -> None:
    """Print the full analysis of one device: peak, owner, fix, curve, tables, leak."""
    verdict = verdict_of(memory, capacity, headroom)
    out.print(Text(_peak(memory, verdict, capacity, headroom), style="bold"))
    out.print(_largest_owner(memory))
    out.print(_fix(memory, verdict), style="green" if verdict.cause == "none" else "yellow")
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
                f"{len(rest):,} more with {show_gib(sum(one.bytes for one in rest))} in total.",
                style="dim",
            )
    out.print()
    if memory.fragmentation is not None:
        for sentence in _fragmentation(memory.fragmentation):
            out.print(sentence)
    out.print(_leak(memory))
    for problem in memory.problems:
        out.print(f"Warning: {memory.path.name}: {problem}.", style="yellow")


def _peak(memory: Memory, verdict: MemoryVerdict, capacity: int | None, headroom: float) -> str:
    """Sentence on peak bytes allocated and reserved, and the headroom if the capacity is known."""
    peak = memory.peak
    reserved = "" if peak.reserved_bytes is None else f", {show_gib(peak.reserved_bytes)} reserved"
    text = f"Peak: {show_gib(peak.allocated_bytes)} allocated{reserved}"
    if memory.fragmentation is not None and memory.fragmentation.out_of_memory:
        text = f"Out of memory. {text}"
    left = verdict.headroom_bytes
    if left is None or capacity is None:
        return f"{text}."
    if left < 0:
        return f"{text}; {show_gib(-left)} above the capacity."
    low = f", below {percent(headroom)}" if verdict.headroom_is_low else ""
    return f"{text}; headroom {show_gib(left)} ({percent(left / capacity)}{low})."


def _largest_owner(memory: Memory) -> str:
    """Sentence naming the code that owns most bytes at the peak, with its share."""
    peak = memory.peak.allocated_bytes
    if not peak:
        return "Nothing was allocated."
    if loss_dominates(memory):
        size = memory.loss_bytes or 0
        place = "" if memory.loss_place is None else f", called at {memory.loss_place}"
        return f"Largest owner: the loss, {percent(size / peak)} ({show_gib(size)}){place}."
    kinds = ", ".join(
        f"{share.category.replace('_', ' ')} {percent(share.bytes / peak)}"
        for share in memory.categories[:3]
        if share.bytes >= 0.005 * peak
    )
    if not memory.holders:
        return f"By kind: {kinds}."
    first = memory.holders[0]
    share = percent(first.bytes / peak)
    return f"Largest owner: {first.place}, {share} of the peak. By kind: {kinds}."


def _fix(memory: Memory, verdict: MemoryVerdict) -> str:
    """Sentence with the suggested fix for the main cause of the peak, or why there is none."""
    if verdict.cause == "none":
        if one_owner_dominates(memory):
            return f"No suggested fix: only a smaller {memory.holders[0].place} lowers the peak."
        return "No suggested fix: no single cause dominates."
    if memory.fragmentation is not None and verdict.cause == "fragmentation":
        return f"Suggested fix: {_fragmentation_fix(memory.fragmentation, memory.peak)}."
    size = show_gib(verdict.bytes or 0)
    fixes: dict[Cause, str] = {
        "leak": f"free what {memory.leak.place} keeps: {size} more every step",
        "loss": "use a chunked or fused cross-entropy, which keeps no copies of the logits",
        "optimizer_step": f"pass fused=True to the optimizer: its step takes {size} temporarily",
        "not_recorded": "record earlier, or with larger max_entries: most was not recorded",
        "activations": "activation checkpointing (recompute), or a smaller micro-batch",
        "model_states": "shard parameters, gradients and optimizer states over more GPUs",
    }
    return f"Suggested fix: {fixes[verdict.cause]}."


def _fragmentation_fix(found: Fragmentation, peak: Peak) -> str:
    """What to do against fragmentation, with the evidence, as a phrase."""
    share = (found.unused_at_peak_bytes or 0) / (peak.reserved_bytes or 1)
    evidence = f"{percent(share)} unused"
    if found.retries:
        evidence = "1 retry" if found.retries == 1 else f"{found.retries:,} retries"
    if found.expandable:
        return f"leave more memory free ({evidence}, with expandable segments)"
    return f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True ({evidence})"


def sparkline(levels: Sequence[int], highest: int, width: int) -> str:
    """A row of block characters, at most `width`, scaled so that `highest` is the tallest.

    `levels` are bytes per event. Each character shows the maximum of its share of the events.
    """
    count = min(width, len(levels))
    shown = []
    for column in range(count):
        start, end = column * len(levels) // count, (column + 1) * len(levels) // count
        level = max(levels[start:end])
        # Zero is a gap; anything above zero is visible.
        rank = -(-level * len(LEVELS) // highest) if highest else 0
        shown.append(LEVELS[rank - 1] if rank else " ")
    return "".join(shown)


def _print_curve(out: Console, memory: Memory) -> None:
    """Print allocated and reserved bytes over the recording, and mark the peak."""
    curve, peak = memory.curve, memory.peak
    width = out.width - _LABEL_WIDTH
    highest = max(curve.allocated + (curve.reserved or []))
    out.print(Text("allocated ") + Text(sparkline(curve.allocated, highest, width), style="cyan"))
    if curve.reserved is not None:
        out.print(Text("reserved  ") + Text(sparkline(curve.reserved, highest, width), style="dim"))
    columns = min(width, len(curve.allocated))
    # The column that contains the peak.
    at = ((peak.event + 1) * columns - 1) // len(curve.allocated)
    events = f"event {peak.event:,} of {peak.events:,}"
    label = f"peak: {events}{_seconds(curve)}"
    device = "" if memory.device is None else f" of device {memory.device}"
    indent = _LABEL_WIDTH + at
    if indent + 2 + len(label) <= out.width:
        line = " " * indent + "^ " + label
    else:
        line = " " * max(0, indent - 1 - len(label)) + label + " ^"
    out.print(line, style="dim", no_wrap=True, overflow="crop")
    out.print(
        f"Horizontal: {_SOURCES[memory.source]}{device}; full height: {show_gib(highest)}.",
        style="dim",
    )


def _seconds(curve: Curve) -> str:
    """The length of the recording in parentheses; empty if it is unknown."""
    if curve.seconds is None:
        return ""
    if curve.seconds >= 1:
        return f" (recorded {curve.seconds:,.2f} s)"
    return f" (recorded {curve.seconds * 1e3:,.2f} ms)"


def _categories(memory: Memory) -> Table:
    """Table of bytes at the peak by kind of memory, and how each kind is recognised."""
    table = plain_table()
    table.add_column("kind of memory", no_wrap=True)
    table.add_column("at the peak", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("recognised by")
    for share in memory.categories:
        table.add_row(
            share.category.replace("_", " ")[:24],
            show_gib(share.bytes),
            _percent(share.bytes, memory),
            Text(_KINDS.get(memory.source, {}).get(share.category, _NAMED), style="dim"),
        )
    return table


def _holders(memory: Memory, top: int) -> Table:
    """Table of the `top` lines of code that hold most bytes at the peak."""
    table = plain_table()
    table.add_column("owner", no_wrap=True)
    table.add_column("kind", no_wrap=True)
    for column in ("at the peak", "share", "allocations"):
        table.add_column(column, justify="right", no_wrap=True)
    for holder in memory.holders[:top]:
        table.add_row(
            _holder_place(holder),
            holder.category,
            show_gib(holder.bytes),
            _percent(holder.bytes, memory),
            f"{holder.allocations:,}",
        )
    return table


def _holder_place(holder: Holder) -> str:
    """File, line and function, shortened to the width of the column."""
    place = holder.place
    if holder.file is not None and PurePosixPath(holder.file).name == "__init__.py":
        place = f"{PurePosixPath(holder.file).parent.name}/{place}"
    return cut(place, _PLACE_WIDTH)


def _percent(size: int, memory: Memory) -> str:
    """A number of bytes as a percentage of the peak; "-" if nothing was allocated."""
    peak = memory.peak.allocated_bytes
    return percent(size / peak, 1) if peak else "-"


def _fragmentation(found: Fragmentation) -> list[str]:
    """Sentences on reserved but unused memory, the largest free block, and OOM retries."""
    parts = {
        "allocated": found.allocated_bytes,
        "waiting for a stream": found.awaiting_bytes,
        "in free segments": found.cached_bytes,
        "free inside used segments": found.split_bytes,
    }
    listed = ", ".join(f"{show_gib(size)} {what}" for what, size in parts.items() if size)
    at_peak = (
        "unknown" if found.unused_at_peak_bytes is None else show_gib(found.unused_at_peak_bytes)
    )
    rounding = f"; rounding {show_gib(found.rounding_bytes)}" if found.rounding_bytes else ""
    segments = f"{found.segments:,} segment{'' if found.segments == 1 else 's'}"
    return [
        f"Fragmentation: {at_peak} reserved but unused at the peak.",
        f"At the end: {show_gib(found.reserved_bytes)} reserved in {segments}: "
        f"{listed or 'all empty'}{rounding}.",
        f"Largest free block: {show_gib(found.largest_free_bytes)}. Requests up to "
        f"{show_gib(found.largest_request_bytes)} need no new segment.",
        f"Out-of-memory errors: {found.out_of_memory:,}. Retries after freeing cached segments: "
        f"{found.retries:,}.",
    ]


def _leak(memory: Memory) -> str:
    """Sentence: whether memory grows from step to step, by how much, and where."""
    leak = memory.leak
    if leak.steps_by is None:
        return "Leak: cannot be decided, because the recording does not show where steps start."
    steps = f"{leak.steps} step{'' if leak.steps == 1 else 's'} {_STEPS[leak.steps_by]}"
    if leak.reason == "too_few_steps":
        return f"Leak: cannot be decided with {steps}; record at least 6 steps."
    if leak.found and leak.bytes_per_step is not None:
        every = "in each of " if leak.steps != 1 else "in "
        return f"Leak: {show_gib(leak.bytes_per_step)} per step at {leak.place}, {every}{steps}."
    return f"Leak: none in {steps}."
