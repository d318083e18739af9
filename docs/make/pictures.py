"""The pictures of "FSDP in five pictures", with numbers from the estimator and the simulator.

`python docs/make/pictures.py` writes them; a test draws them again and compares.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from make.figures import figure, simulated
from shardwise.predict.api import estimate_run
from shardwise.spec.question import describe_run

FOLDER = Path(__file__).resolve().parents[1] / "concepts"
MODEL, CLUSTER, DEVICES = "llama-3-8b", "8xH100-SXM", 8
WIDTH = 760
INK = "#808080"
PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS = "#3b82f6", "#f59e0b", "#8b5cf6", "#10b981"
GIB = 2**30


class Picture(NamedTuple):
    """An SVG under construction: what it shows in words, its height, its elements."""

    words: str
    height: int
    elements: list[str]

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            f'role="img" font-family="system-ui, sans-serif" font-size="13" fill="{INK}">'
        )
        arrow = (
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>'
        )
        title = f"<title>{escape(self.words)}</title>"
        return "\n".join([head, arrow, title, *self.elements, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, *, anchor: str = "start", **more: str) -> str:
    extra = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{extra}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, opacity: float = 1) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" '
        f'fill="{colour}" fill-opacity="{opacity}"/>'
    )


def frame(x: float, y: float, width: float, height: float) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="6" '
        f'fill="none" stroke="{INK}" stroke-opacity="0.6"/>'
    )


def arrow(x: float, y: float, to_x: float, to_y: float) -> str:
    return (
        f'<path d="M{x:.1f} {y:.1f} L{to_x:.1f} {to_y:.1f}" stroke="{INK}" stroke-width="1.5" '
        'fill="none" marker-end="url(#arrow)"/>'
    )


def white(x: float, y: float, words: str) -> str:
    return text(x, y, words, anchor="middle", fill="#ffffff", font_weight="600")


def capacity() -> float:
    run = describe_run(MODEL, CLUSTER, "ddp")
    return run.cluster.device.capacity / GIB


def one_gpu() -> Picture:
    """1: what training keeps on a GPU, against what the GPU has."""
    numel = estimate_run(describe_run(MODEL, CLUSTER, "ddp")).model["parameters"]
    parts = [
        ("parameters", 4 * numel / GIB, PARAMETERS),
        ("gradients", 4 * numel / GIB, GRADIENTS),
        ("optimizer states", 8 * numel / GIB, OPTIMIZER),
    ]
    total, limit = sum(size for _, size, _ in parts), capacity()
    scale, left, top = 700 / total, 30, 52
    words = f"Training Llama-3-8B: {total:.0f} GiB of model states. An H100 has {limit:.0f} GiB."
    drawn, at = [text(left, 24, words, font_weight="600")], float(left)
    for name, size, colour in parts:
        middle = at + size * scale * (0.5 if colour != OPTIMIZER else 0.66)  # beside the limit
        drawn += [
            box(at, top, size * scale - 2, 54, colour),
            white(middle, top + 24, name),
            white(middle, top + 42, f"{size:.1f} GiB"),
        ]
        at += size * scale
    x = left + limit * scale
    drawn += [
        f'<path d="M{x:.1f} {top - 10} V{top + 66}" stroke="#ef4444" stroke-width="2.5"/>',
        text(x, top + 84, "memory of one H100", anchor="middle", fill="#ef4444"),
    ]
    return Picture(words, top + 94, drawn)


def gpu(x: float, y: float, name: str, shares: Sequence[float], height: float = 92) -> list[str]:
    """A GPU with a bar for parameters, gradients and optimizer states, filled by their shares."""
    drawn = [frame(x, y, 150, height), text(x + 75, y + 18, name, anchor="middle")]
    widths = (1, 1, 2)
    for row, (share, colour) in enumerate(
        zip(shares, (PARAMETERS, GRADIENTS, OPTIMIZER), strict=True)
    ):
        full, bar_y = 31.0 * widths[row] + 4, y + 28 + row * 20
        drawn += [
            box(x + 12, bar_y, full * 1.9, 14, colour, 0.15),
            box(x + 12, bar_y, full * 1.9 * share, 14, colour),
        ]
    return drawn


def replicas() -> Picture:
    """2: data parallelism keeps everything on every GPU."""
    words = "Data parallelism (DDP): every GPU holds everything and trains on its own sequences."
    drawn = [text(30, 24, words, font_weight="600")]
    for number in range(4):
        x = 30 + number * 180
        drawn += gpu(x, 74, f"GPU {number}", (1, 1, 1))
        drawn += [text(x + 75, 52, f"sequences {number}", anchor="middle", fill=ACTIVATIONS)]
        drawn += [arrow(x + 75, 57, x + 75, 72)]
    drawn += [
        f'<path d="M105 186 H645" stroke="{GRADIENTS}" stroke-width="3"/>',
        *(arrow(105 + n * 180, 186, 105 + n * 180, 168) for n in range(4)),
        text(380, 206, "all-reduce: after each backward all GPUs average their gradients",
             anchor="middle"),
    ]  # fmt: skip
    return Picture(words, 250, [*drawn, *legend(232)])


def legend(y: float) -> Iterator[str]:
    at = 180.0
    for name, colour in (
        ("parameters", PARAMETERS), ("gradients", GRADIENTS), ("optimizer states", OPTIMIZER)
    ):  # fmt: skip
        yield box(at, y - 11, 12, 12, colour)
        yield text(at + 18, y, name)
        at += 140


SHARDED = {
    "DDP": ("ddp", (1, 1, 1), "everything whole"),
    "ZeRO-1": ("zero1", (1, 1, 1 / DEVICES), "optimizer states sharded"),
    "ZeRO-2": ("zero2", (1, 1 / DEVICES, 1 / DEVICES), "and gradients"),
    "ZeRO-3": ("zero3", (1 / DEVICES, 1 / DEVICES, 1 / DEVICES), "and parameters"),
}


def stages() -> Picture:
    """3: what each ZeRO stage shards, and the memory that is left."""
    words = f"Sharding: each of {DEVICES} GPUs keeps 1/{DEVICES} of more and more."
    drawn = [text(30, 24, words, font_weight="600")]
    for number, (name, (strategy, shares, told)) in enumerate(SHARDED.items()):
        x = 30 + number * 180
        run = describe_run(
            MODEL, CLUSTER, strategy, seq_len=4096, recompute="full", accumulate=2
        )  # accumulation tells ZeRO-1 from ZeRO-2
        peak = estimate_run(run).memory.peak_allocated_bytes / GIB
        drawn += gpu(x, 44, name, shares)
        drawn += [
            text(x + 75, 156, told, anchor="middle"),
            text(x + 75, 178, f"{peak:.1f} GiB per GPU", anchor="middle", font_weight="600"),
        ]
    return Picture(words, 222, [*drawn, *legend(210)])


def life() -> Picture:
    """4: what happens to one block in a step of ZeRO-3."""
    words = "One block in a step of ZeRO-3 (FSDP): gathered when needed, freed at once."
    drawn = [text(30, 24, words, font_weight="600")]
    stations = [
        ("shard", PARAMETERS, 0.25), ("whole block", PARAMETERS, 1.0), ("shard", PARAMETERS, 0.25),
        ("whole block", PARAMETERS, 1.0), ("gradients", GRADIENTS, 1.0), ("shard", GRADIENTS, 0.25),
    ]  # fmt: skip
    moves = ["all-gather", "forward, free", "all-gather", "backward", "reduce-scatter"]
    for number, (name, colour, share) in enumerate(stations):
        x = 30 + number * 122
        drawn += [
            box(x, 56, 78, 48, colour, 0.15),
            box(x, 56, 78 * share, 48, colour),
            text(x + 39, 122, name, anchor="middle"),
        ]
        if number < len(moves):
            drawn.append(arrow(x + 82, 80, x + 118, 80))
            drawn.append(text(x + 100, 48, moves[number], anchor="middle", font_size="11"))
    return Picture(words, 134, drawn)


def overlap() -> Picture:
    """5: the simulated step of ZeRO-3 on a fast and on a slow network, on one scale of time."""
    timelines = {rate: simulated("zero3", f"2x8xH100-SXM@{rate}Gbps") for rate in (400, 50)}
    longest = max(one.window[1] for one in timelines.values())
    words = "Communication hides behind compute on a fast network, and shows on a slow one."
    drawn, top = [text(4, 24, words, font_weight="600")], 36.0
    for rate, timeline in timelines.items():
        panel = figure(timeline, f"ZeRO-3, {rate} Gbit/s per GPU", longest)
        height = float(panel.split(f'viewBox="0 0 {WIDTH} ', 1)[1].split('"', 1)[0])
        drawn.append(panel.replace("<svg ", f'<svg y="{top:.0f}" height="{height:.0f}" ', 1))
        top += height + 8
    return Picture(words, int(top), drawn)


def draw_all() -> dict[str, str]:
    """The pictures by file name."""
    makers = (one_gpu, replicas, stages, life, overlap)
    return {f"picture-{number}.svg": make().svg() for number, make in enumerate(makers, 1)}


if __name__ == "__main__":
    for file, drawn in draw_all().items():
        (FOLDER / file).write_text(drawn, encoding="utf-8")
        sys.stdout.write(f"{FOLDER / file}\n")
