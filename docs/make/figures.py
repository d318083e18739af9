"""Figures of concepts, drawn from the simulator's own timelines.

`python docs/make/figures.py` writes them; a test draws them again and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

from markupsafe import escape

from shardwise.predict.api import replay_run
from shardwise.spec import catalogue
from shardwise.spec.model import ModelSpec
from shardwise.spec.question import describe_run
from shardwise.step.breakdown import breakdown
from shardwise.step.spans import Timeline

FOLDER = Path(__file__).resolve().parents[1] / "concepts"
# Few enough blocks to be seen, each as large as those of the whole model.
BLOCKS = 4
PRESET, CLUSTER, SEQ_LEN = "llama-3-8b", "2x8xH100-SXM@400Gbps", 4096
STRATEGIES = {
    "ddp": "DDP: gradients are all-reduced in buckets as the backward fills them",
    "zero2": "zero2: every unit is gathered once and stays until its backward",
    "zero3": "zero3: every block is gathered for its forward and again for its backward",
    "hsdp": "hsdp: zero3 inside a node, and an all-reduce of shards between nodes",
}

WIDTH, LEFT, RIGHT, TOP, LANE, GAP = 760, 104, 16, 46, 22, 5
INK = "#808080"
COLOURS = {
    "forward": "#3b82f6",
    "backward": "#6366f1",
    "optimizer": "#8b5cf6",
    "copy": "#6b7280",
    "all-gather": "#f59e0b",
    "reduce-scatter": "#ef4444",
    "all-reduce": "#10b981",
}


def draw_all() -> dict[str, str]:
    """The figures by file name, all on one scale of time."""
    timelines = {kind: simulated(kind) for kind in STRATEGIES}
    longest = max(one.window[1] for one in timelines.values())
    return {
        f"traffic-{kind}.svg": figure(one, STRATEGIES[kind], longest)
        for kind, one in timelines.items()
    }


def simulated(kind: str, cluster: str = CLUSTER) -> Timeline:
    """The simulated step of the example under a strategy."""
    fields = catalogue.model(PRESET).model_dump()
    model = ModelSpec.read({**fields, "name": "four blocks", "layers": BLOCKS})
    timeline = replay_run(describe_run(model, cluster, kind, seq_len=SEQ_LEN))
    assert timeline is not None
    return timeline


def figure(timeline: Timeline, title: str, longest_ns: int) -> str:
    """Every lane that is used as a row of bars; numbers are blocks, R the root."""
    rows: dict[str, list[int]] = {}
    for index in range(len(timeline)):
        rows.setdefault(_row(timeline, index), []).append(index)
    lanes = [lane for lane in ("compute", *COLOURS) if lane in rows]
    height = TOP + len(lanes) * (LANE + GAP) + 30
    across = (WIDTH - LEFT - RIGHT) / longest_ns
    parts = breakdown(timeline)
    waits = parts.exposed_communication_ns / parts.window_ns
    told = (
        f"{title}. Simulated: {parts.window_ns / 1e6:.0f} ms, "
        f"{waits:.0%} of it waiting for the network."
    )
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'font-family="system-ui, sans-serif" font-size="11" fill="{INK}">',
        f"<title>{escape(told)}</title>",
        f'<text x="4" y="16" font-size="13" font-weight="600">{escape(title)}</text>',
        f'<text x="4" y="33">{escape(told.split(". ", 1)[1])}</text>',
    ]
    for number, lane in enumerate(lanes):
        top = TOP + number * (LANE + GAP)
        drawn.append(f'<text x="{LEFT - 8}" y="{top + 15}" text-anchor="end">{lane}</text>')
        drawn.append(
            f'<rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{LANE}" '
            f'fill="{INK}" fill-opacity="0.08"/>'
        )
        drawn += [part for index in rows[lane] for part in _bar(timeline, index, top, across)]
    drawn += _clock(longest_ns, across, height - 12)
    return "\n".join([*drawn, "</svg>"]) + "\n"


def _row(timeline: Timeline, index: int) -> str:
    lane = timeline.lanes[timeline.lane[index]]
    return "compute" if lane == "optimizer" else lane


def _bar(timeline: Timeline, index: int, top: int, across: float) -> list[str]:
    lane = timeline.lanes[timeline.lane[index]]
    name = timeline.names[timeline.name[index]]
    colour = COLOURS[name if lane == "compute" else lane]
    left = LEFT + timeline.start_ns[index] * across
    width = max(0.5, (timeline.end_ns[index] - timeline.start_ns[index]) * across - 0.5)
    bar = (
        f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{LANE}" rx="2" '
        f'fill="{colour}"/>'
    )
    unit = timeline.units[timeline.unit[index]] if timeline.unit[index] >= 0 else ""
    label = "R" if unit == "root" else unit.rpartition(" ")[2]
    if width < 9 or not label:
        return [bar]
    middle = left + width / 2
    return [
        bar,
        f'<text x="{middle:.1f}" y="{top + 15}" text-anchor="middle" fill="#ffffff">{label}</text>',
    ]


def _clock(longest_ns: int, across: float, bottom: int) -> list[str]:
    step = 20_000_000 if longest_ns > 60_000_000 else 10_000_000
    return [
        f'<text x="{LEFT + at * across:.1f}" y="{bottom}" text-anchor="middle">'
        f"{at // 1_000_000}{' ms' if at == 0 else ''}</text>"
        for at in range(0, longest_ns + 1, step)
    ]


if __name__ == "__main__":
    for file, text in draw_all().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
        sys.stdout.write(f"{FOLDER / file}\n")
