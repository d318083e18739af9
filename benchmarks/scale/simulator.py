"""Cost of a step replayed as a timeline, by depth and micro-batches, and of its estimate alone."""

from __future__ import annotations

import time

from benchmarks.page import rows
from benchmarks.scale.cost import Measured, Part, timed

LAYERS, ACCUMULATE = (16, 32, 64, 126, 512), (1, 4, 16, 64)


def measure(layers: int, accumulate: int) -> dict[str, float]:
    """Measure one fully sharded step on 512 devices, with the blocks of an 8B model."""
    from shardwise.predict.api import estimate_run, replay_run
    from shardwise.spec.lookup import find_model
    from shardwise.spec.model import ModelSpec
    from shardwise.spec.question import describe_run

    model = find_model("llama-3-8b")
    assert isinstance(model, ModelSpec)
    run = describe_run(
        model.but(layers=layers),
        "64x8xH100-SXM@400Gbps",
        "zero3",
        accumulate=accumulate,
        recompute="full",
    )
    start = time.process_time()
    estimate_run(run)
    estimated = time.process_time()
    timeline = replay_run(run)
    assert timeline is not None
    return {
        "estimate_s": estimated - start,
        "replay_s": time.process_time() - estimated,
        "spans": len(timeline),
    }


def table(found: list[Measured]) -> str:
    return rows(
        ["blocks", "micro-batches", "spans", "replay (with spans)", "estimate (no spans)"],
        [
            [
                *(f"{one.case['layers']:,}", f"{one.case['accumulate']:,}", f"{one['spans']:,.0f}"),
                *(timed(one, "replay_s"), timed(one, "estimate_s")),
            ]
            for one in found
        ],
    )


def _cases(layers: tuple[int, ...], accumulate: tuple[int, ...]) -> list[dict[str, int]]:
    deep = [{"layers": n, "accumulate": 1} for n in layers]
    return deep + [{"layers": 32, "accumulate": n} for n in accumulate if n > 1]


PART = Part(
    "One step as a timeline",
    _cases(LAYERS, ACCUMULATE),
    _cases((16, 32, 64), (1, 4, 8)),
    measure,
    table,
)
