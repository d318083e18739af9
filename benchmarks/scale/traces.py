"""Cost of reading traces, by ranks and by events per trace."""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path

from benchmarks.page import rows
from benchmarks.scale.cost import (
    Case,
    Measured,
    MissingError,
    Part,
    cpu_s,
    exponent,
    in_subprocess,
    memory_mb,
    reset_peak,
    seconds,
    size,
    timed,
)

RANKS, STEPS = (1, 8, 64, 256), (3, 30, 300)
PROJECTED = (1024, 4096)
BLOCKS = 32


def measure(what: str, count: int) -> dict[str, float]:
    return _ranks(count) if what == "ranks" else _events(count)


def _ranks(count: int) -> dict[str, float]:
    """Read, join and explain traces of a real run of 8 ranks, copied up to `count` ranks."""
    from benchmarks import trace_ranks

    if not trace_ranks.TRACES.is_dir():
        raise MissingError("needs the traces in ../shared/traces")
    # Writing the copies is not measured.
    with tempfile.TemporaryDirectory() as folder:
        paths = in_subprocess(trace_ranks.write, Path(folder), count)
        return _read(paths, count)


def _read(paths: list[Path], count: int) -> dict[str, float]:
    from shardwise.observe.diagnosis.verdicts import verdicts_of
    from shardwise.observe.summary import summarise

    before = reset_peak()
    begun = cpu_s()
    summary = summarise(paths)
    verdicts_of(summary)
    took = cpu_s() - begun
    return {
        "read_s": took,
        "text_bytes": sum(path.stat().st_size for path in paths),
        "calls": sum(len(rank.calls) for rank in summary.ranks),
        "collectives": summary.joined.collectives if summary.joined else 0,
        "grown_mb": memory_mb("VmHWM") - before,
        "ranks": count,
    }


def _events(steps: int) -> dict[str, float]:
    """Read one synthetic FSDP2 trace with `steps` steps."""
    with tempfile.TemporaryDirectory() as folder:
        path = in_subprocess(_write, folder, steps)
        text = in_subprocess(_count, path)
        found = _read([path], 1)
    return {**found, "text_bytes": text[0], "events": text[1]}


def _write(folder: str, steps: int) -> Path:
    from tests.observe.synthetic import Plan, build

    return build(Path(folder), Plan(blocks=BLOCKS, steps=steps)).paths[0]


def _count(path: Path) -> tuple[int, int]:
    text = gzip.decompress(path.read_bytes())
    return len(text), text.count(b'"ph"')


def table(found: list[Measured]) -> str:
    ranks = [one for one in found if one.case["what"] == "ranks"]
    events = [one for one in found if one.case["what"] == "events"]
    text = ""
    if ranks:
        body = [
            [
                *(f"{one.case['count']:,}", size(one["text_bytes"]), f"{one['calls']:,.0f}"),
                *(timed(one, "read_s"), size(one["grown_mb"] * 2**20)),
            ]
            for one in ranks
        ]
        last = ranks[-1]
        for count in PROJECTED:
            more = count / last.case["count"]
            body.append([
                *(f"*{count:,}*", f"*{size(last['text_bytes'] * more)}*"),
                *(f"*{last['calls'] * more:,.0f}*", f"*{seconds(last['read_s'] * more)}*"),
                f"*{size(last['grown_mb'] * more * 2**20)}*",
            ])  # fmt: skip
        text += rows(
            [
                "ranks",
                "size of traces",
                "calls",
                "read, join, explain",
                "memory of the joining process",
            ],
            body,
        )
        many = [one for one in ranks if one.case["count"] > 1]
        p = exponent([o.case["count"] for o in many], [o["read_s"] for o in many])
        text += f"\nFrom 8 ranks up, time grows as ranks to the power {p:.2f}.\n\n"
    text += rows(
        ["events per trace", "text", "read", "memory"],
        [
            [f"{one['events']:,.0f}", size(one["text_bytes"]), timed(one, "read_s"),
             size(one["grown_mb"] * 2**20)]
            for one in events
        ],
    )  # fmt: skip
    p = exponent([one["events"] for one in events], [one["read_s"] for one in events])
    return text + f"\nTime grows as events to the power {p:.2f}.\n"


def _cases(ranks: tuple[int, ...], steps: tuple[int, ...]) -> list[Case]:
    each: list[Case] = [{"what": "ranks", "count": n} for n in ranks]
    return each + [{"what": "events", "count": n} for n in steps]


PART = Part("Traces", _cases(RANKS, STEPS), _cases((8, 16), (3, 30)), measure, table)
