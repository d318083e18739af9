"""Steps as lanes of spans, with memory over the same time axis, packed for a script to draw.

Columns of integers, deflated: a quarter of a million spans take less than two megabytes.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.report.page.markup import Markup, element, fragment
from shardwise.report.page.subject import Subject
from shardwise.spec.foreign_text import visible
from shardwise.step.memory_words import show_memory
from shardwise.step.spans import KINDS, Timeline

if TYPE_CHECKING:
    from shardwise.observe.rank.summary import RankSummary

# Most spans of all ranks, beyond which ranks are left out; and of one rank, beyond which short
# neighbouring spans are merged.
MOST_SPANS = 400_000
MOST_OF_ONE = 60_000
MOST_MEMORY = 4_000
# Relative difference below which two peaks count as equal.
_SAME_PEAK = 0.005
# Ticks of the clock over the longest step: finer than any screen can zoom.
_TICKS = 2**30


class Step(NamedTuple):
    """One step of one rank: its timeline starts at 0, its length is in nanoseconds."""

    name: str
    kind: str
    timeline: Timeline
    length_ns: int
    remark: str = ""


def timeline_section(subjects: Sequence[Subject]) -> Markup | None:
    """Lanes of a simulated and a measured step on one clock; a script zooms and moves them."""
    steps, remarks = _steps(subjects)
    if not steps:
        return None
    told = steps_json(steps)
    legend = element(
        "ul",
        [element("li", element("i", class_=f"p-{name}"), text) for name, text in (
            ("compute", "compute"), ("communication", "communication"), ("copies", "copies"))],
        class_="legend",
    )  # fmt: skip
    return fragment(
        element(
            "p",
            "One step on one clock. ",
            element(
                "span",
                "Drag to move, pinch or Ctrl-wheel to zoom; or with the keys ← → + − 0. A name "
                "opens and closes its lanes.",
                class_="moving",
            ),
        ),
        element(
            "div",
            legend,
            element("div", class_="buttons", role="group", aria_label="zoom"),
            element("div", class_="lanes", tabindex="0", role="group", aria_label=_alt(steps)),
            element("p", class_="hint", role="status"),
            class_="timeline",
            id="timeline",
        ),
        element("noscript", element("p", "The timeline is drawn by a script.")),
        [element("p", remark, class_="fine") for remark in remarks],
        # A data block is never run; "<" cannot end it early.
        Markup('<script type="application/json" id="timeline-data">'),
        Markup(json.dumps(told, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")),
        Markup("</script>"),
    )


def _alt(steps: Sequence[Step]) -> str:
    """A description of the timeline for screen readers."""
    told = ", ".join(f"{s.name} ({s.kind}, {s.length_ns / 1e6:,.1f} ms)" for s in steps[:8])
    return f"Timeline of {len(steps)} steps: {told}"


# ---- which steps ----------------------------------------------------------------------------


def _steps(subjects: Sequence[Subject]) -> tuple[list[Step], list[str]]:
    """Steps to draw and remarks on them; steps beyond `MOST_SPANS` spans are left out."""
    found: list[Step] = []
    remarks: list[str] = []
    several = len(subjects) > 1
    for subject in subjects:
        of = f"{subject.name}: " if several else ""
        if subject.simulated is not None:
            length = subject.simulated.window[1]
            found.append(Step(f"{of}simulated", "simulated", subject.simulated, length))
        if subject.traced is not None:
            found += _measured(subject, of, remarks)
    room = MOST_SPANS
    kept = []
    for step in found:
        if len(step.timeline) <= room:
            kept.append(step)
            room -= len(step.timeline)
    if len(kept) < len(found):
        remarks.append(
            f"{len(found) - len(kept)} of {len(found)} timelines are left out, so that the page "
            "stays small; name fewer traces to see them."
        )
    return kept, remarks


def _measured(subject: Subject, of: str, remarks: list[str]) -> Iterator[Step]:
    """The measured step of each rank of a subject; appends remarks to `remarks`.

    `of` is a prefix of names.
    """
    assert subject.traced is not None
    joined = subject.traced.summary.joined
    ranks = subject.traced.summary.ranks
    resting = _resident_bytes(subject)
    merged = curve_peak = 0
    for number, rank in enumerate(ranks):
        if rank.timeline is None:
            continue
        window = _middle_step(ranks, number)
        # Ranks of one run share a clock, so that who waits for whom can be seen.
        offset = int(joined.offset_ns[number]) if joined is not None else 0
        begin = _middle_step(ranks, 0)[0] - offset if joined is not None else window[0]
        cut = rank.timeline.cut(window, begin)
        if rank.on_cpu:
            cut = replace(cut, memory_bytes=cut.memory_bytes + resting)
        curve_peak = max(curve_peak, int(cut.memory_bytes.max(initial=0)))
        thinned = thin_out(cut, MOST_OF_ONE)
        merged += len(cut) - len(thinned)
        yield Step(f"{of}{rank.name}", "measured", thinned, window[1] - window[0])
    remarks += _other_peak(subject, of, curve_peak)
    if merged:
        remarks.append(f"{of}{merged:,} spans too short to see were joined with their neighbours.")
    if resting and any(r.on_cpu and r.timeline is not None and len(r.timeline.memory_ns)
                       for r in ranks):  # fmt: skip
        remarks.append(
            f"{of}A CPU's profiler counts what is allocated while it runs; parameters and states "
            "that were there before, as weighed by the run, are added to its curve."
        )


def _other_peak(subject: Subject, of: str, curve_peak: int) -> list[str]:
    """A remark if the peak of the memory curve differs from the measured peak; else empty."""
    if not curve_peak or subject.measured is None or subject.measured.memory is None:
        return []
    tensors = subject.measured.memory.peak_allocated_bytes
    if abs(curve_peak / tensors - 1) < _SAME_PEAK:
        return []
    return [
        f"{of}The memory curve is all that the profiler counts, buffers of kernels and collectives "
        f"included: up to {show_memory(curve_peak)}. Tensors alone peak at {show_memory(tensors)}."
    ]


def _middle_step(ranks: Sequence[RankSummary], number: int) -> tuple[int, int]:
    """Window (begin, end) in nanoseconds of one step of rank `number`.

    The step is that of median length on the first rank.
    """
    first = ranks[0].windows
    order = sorted(range(len(first)), key=lambda n: first[n][1] - first[n][0])
    place = order[len(order) // 2] if order else 0
    windows = ranks[number].windows
    return windows[place] if place < len(windows) else ranks[number].span


def _resident_bytes(subject: Subject) -> int:
    """Bytes of parameters and optimizer states that the run measured; 0 if it did not."""
    if subject.measured is None or subject.measured.memory is None:
        return 0
    terms = subject.measured.memory.terms
    return terms.get("parameters", 0) + terms.get("optimizer", 0)


def thin_out(timeline: Timeline, most: int) -> Timeline:
    """Merge short neighbouring spans of one kind on one lane until at most `most` spans remain."""
    order = np.lexsort((timeline.start_ns, timeline.lane))
    names = ("lane", "start_ns", "end_ns", "kind", "name", "unit", "bytes")
    columns = {name: getattr(timeline, name)[order] for name in names}
    begin, end = timeline.window
    gap = max(1, (end - begin) // 20_000)
    while len(columns["lane"]) > most:
        c = columns
        short = (c["end_ns"] - c["start_ns"]) < gap
        joins = np.zeros(len(short), dtype=np.bool_)
        joins[1:] = (
            (c["lane"][1:] == c["lane"][:-1])
            & (c["kind"][1:] == c["kind"][:-1])
            & (short[1:] & short[:-1])
            & (c["start_ns"][1:] - c["end_ns"][:-1] < gap)
        )
        first = np.flatnonzero(~joins)
        ends = np.maximum.reduceat(c["end_ns"], first)
        moved = np.add.reduceat(c["bytes"], first)
        columns = {name: column[first] for name, column in c.items()}
        columns |= {"end_ns": ends, "bytes": moved}
        gap *= 2
    return Timeline(
        **columns,
        lanes=timeline.lanes,
        names=timeline.names,
        units=timeline.units,
        memory_ns=timeline.memory_ns,
        memory_bytes=timeline.memory_bytes,
    )


# ---- packing --------------------------------------------------------------------------------


def steps_json(steps: Sequence[Step]) -> dict[str, Any]:
    """Steps as JSON for the page's script: columns of spans and a memory curve for each step.

    Names are stored once for all steps. Times are in ticks of `tick_ns` nanoseconds.
    """
    first = min(s.timeline.window[0] for s in steps)
    last = max(s.timeline.window[1] for s in steps)
    tick = max(1, -(-(last - first) // _TICKS))
    names: dict[str, int] = {}
    return {
        "begin_ns": first,
        "length_ns": last - first,
        "tick_ns": tick,
        "steps": [_step_json(step, first, tick, names) for step in steps],
        "kinds": list(KINDS),
        "names": list(names),
    }


def _step_json(step: Step, first: int, tick: int, names: dict[str, int]) -> dict[str, Any]:
    """One step as JSON; times are ticks since `first`, and new names are added to `names`."""
    t = step.timeline
    used = np.unique(t.lane).tolist()
    order = np.lexsort((t.start_ns, t.lane))
    lane = np.searchsorted(used, t.lane[order])
    start = (t.start_ns[order] - first) // tick
    length = np.maximum(1, (t.end_ns[order] - t.start_ns[order]) // tick)
    starts = np.diff(start, prepend=0)  # differences repeat, and deflate to less
    columns = [lane, starts, length, t.kind[order], _name_codes(t, order, names)]
    points = _curve(t)
    return {
        "name": visible(step.name),
        "kind": step.kind,
        "length_ns": step.length_ns,
        "lanes": [visible(t.lanes[n]) for n in used],
        "spans": len(t),
        "columns": _deflate(np.stack(columns).astype(np.int32)),
        "memory": {
            "points": points.shape[1],
            "columns": _deflate(
                np.stack([(points[0] - first) // tick, points[1] // 1024]).astype(np.int32)
            ),
        },
    }


def _name_codes(t: Timeline, order: npt.NDArray[np.int64], names: dict[str, int]) -> Any:
    """The code of each span's name on the page, in `order`; new names are added to `names`.

    The name of a span ends with its FSDP unit, if it has one.
    """
    pairs = np.stack([t.name[order], t.unit[order]], axis=1)
    found, inverse = np.unique(pairs, axis=0, return_inverse=True)
    codes = []
    for name, unit in found.tolist():
        told = t.names[name][:160]
        told = f"{told} · {t.units[unit]}" if unit >= 0 else told
        codes.append(names.setdefault(visible(told), len(names)))
    return np.asarray(codes, dtype=np.int64)[inverse.reshape(-1)] if codes else np.empty(0)


def _curve(t: Timeline) -> npt.NDArray[np.int64]:
    """Times (ns) and bytes of the memory curve as two rows; at most `MOST_MEMORY` points.

    Of too many points, the largest of each group is kept.
    """
    points = np.stack([t.memory_ns, t.memory_bytes]) if len(t.memory_ns) else np.empty((2, 0))
    count = points.shape[1]
    if count > MOST_MEMORY:
        each = -(-count // MOST_MEMORY)
        first = np.arange(0, count, each)
        points = np.stack([points[0][first], np.maximum.reduceat(points[1], first)])
    return points.astype(np.int64)


def _deflate(columns: npt.NDArray[np.int32]) -> str:
    """Integers as little-endian 32-bit, deflated, in base64."""
    raw = columns.astype("<i4").tobytes()
    return base64.b64encode(zlib.compress(raw, 9)).decode("ascii")
