"""Judges an answer of `plan --json` against what an expert accepts, and against itself.

Every check reads records, never sentences.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

# A recommendation below this MFU is laughable, and so is one that breaks an expert's first rules.
LEAST_MFU = 0.05
DDP_LOSS = 0.02
USUAL_BATCH = 2**22
BATCH_CHANGE = 0.05
WANTED_HEADROOM = 0.1
# Rounding of shares in JSON; and differences that a screen shows.
EXACT = 1e-6
VISIBLE = 0.005

AXES = ("replicate", "shard", "tensor", "context")

Answer = dict[str, Any]


class Accept(NamedTuple):
    """What an expert accepts; what is absent may be anything."""

    exits: tuple[int, ...] = (0,)
    kinds: tuple[str, ...] = ()
    # The largest degree of tensor parallelism; the bounds of devices that share sequences.
    tensor: int | None = None
    inner: tuple[int, int] | None = None
    recompute: tuple[str, ...] = ()
    mfu: tuple[float, float] | None = None
    devices: tuple[int, ...] = ()
    step_tokens: int | None = None
    keeps: int | None = None
    headroom: float | None = None
    # Kinds of warnings that must be there, and of alternatives that must be offered.
    warns: tuple[str, ...] = ()
    offers: tuple[str, ...] = ()
    offers_if_none: tuple[str, ...] = ()
    offers_other: tuple[str, ...] = ()


def misses(accept: Accept, code: int, answer: Answer | None) -> Iterator[str]:
    """What an expert would not accept."""
    if code not in accept.exits:
        yield f"exit {code}"
    if answer is None:
        return
    said = {warning["kind"] for warning in answer.get("warnings", ())}
    for kind in accept.warns:
        if kind not in said:
            yield f"no warning: {kind}"
    offered = {tip["change"] for tip in answer["tips"] if tip["kind"] == "alternative"}
    winner = answer["winner"]
    wanted = accept.offers + (() if winner else accept.offers_if_none)
    yield from (f"not offered: {change}" for change in wanted if change not in offered)
    other = [p for tip in answer["tips"] if tip["kind"] == "other parallelism"
             for p in tip["parallelism"]]  # fmt: skip
    yield from (f"not named: {kind}" for kind in accept.offers_other if kind not in other)
    if winner is not None:
        yield from _of_winner(accept, answer, winner)


def _of_winner(accept: Accept, answer: Answer, winner: Answer) -> Iterator[str]:
    strategy = winner["strategy"]
    kind, tensor = strategy["kind"], strategy["tensor"]
    inner = tensor * strategy["context"]
    if accept.kinds and kind not in accept.kinds:
        yield f"kind {kind}"
    if accept.tensor is not None and tensor > accept.tensor:
        yield f"tensor {tensor}"
    if accept.inner and not accept.inner[0] <= inner <= accept.inner[1]:
        yield f"{inner} devices share sequences"
    if accept.recompute and strategy["recompute"] not in accept.recompute:
        yield f"recompute {strategy['recompute']}"
    if accept.mfu and not accept.mfu[0] <= winner["mfu"] <= accept.mfu[1]:
        yield f"MFU {winner['mfu']:.0%}"
    if accept.devices and _devices(winner) not in accept.devices:
        yield f"{_devices(winner)} devices"
    if accept.step_tokens and winner["tokens_per_step"] > accept.step_tokens:
        yield f"{winner['tokens_per_step']:,} tokens per step"
    if accept.keeps and winner["tokens_per_step"] != accept.keeps:
        yield f"{winner['tokens_per_step']:,} tokens per step"
    if accept.headroom and _headroom(answer, winner) < accept.headroom:
        yield f"headroom {_headroom(answer, winner):.0%}"


def laughable(answer: Answer) -> Iterator[str]:
    """What no expert would say, whatever the question."""
    winner, job = answer["winner"], answer["job"]
    if winner is None:
        return
    strategy, said = winner["strategy"], {w["kind"] for w in answer.get("warnings", ())}
    if winner["mfu"] < LEAST_MFU:
        yield f"recommends MFU {winner['mfu']:.0%}"
    if _headroom(answer, winner) < WANTED_HEADROOM - 0.01 and "fragile" not in said:
        yield f"headroom {_headroom(answer, winner):.1%} is not called fragile"
    if not answer["fitted"] and "unfitted device" not in said:
        yield "the device was never fitted, and no warning says so"
    if strategy["kind"] == "ddp":
        yield from _poor_ddp(answer, winner)
    asked, tokens = job.get("global_batch"), winner["tokens_per_step"]
    if asked and abs(tokens / asked - 1) > BATCH_CHANGE:
        yield f"{tokens:,} tokens per step instead of {asked:,}"
    if not asked:
        size = strategy["micro_batch"]
        if size // (size & -size) not in (1, 3):
            yield f"micro-batch {size}, which nobody asked for"
        least = job["seq_len"] * _devices(winner)
        if tokens > max(USUAL_BATCH, least):
            yield f"{tokens:,} tokens per step, which nobody asked for"


def _poor_ddp(answer: Answer, winner: Answer) -> Iterator[str]:
    """DDP may be 2 % slower, and never larger and slower."""
    for row in answer["layouts"]:
        if row["tokens_per_step"] != winner["tokens_per_step"] or _degrees(row) != (1, 1):
            continue
        gain = row["tokens_per_s"] / winner["tokens_per_s"] - 1
        smaller = row["needed_bytes"] < winner["needed_bytes"]
        if gain > DDP_LOSS or (gain > VISIBLE and smaller):
            larger = " and larger" if smaller else ""
            yield f"DDP is {gain:.1%} slower{larger} than {row['strategy']['kind']}"


def contradictions(answer: Answer) -> Iterator[str]:
    """Records that disagree with the rows of the table, and with each other."""
    winner, limit = answer["winner"], answer["limit_bytes"]
    rejected = [one["least_bytes"] for one in answer["rejected"]]
    if any(size <= limit for size in rejected):
        yield "a rejected layout fits"
    for row in answer["layouts"]:
        if not math.isclose(row["tokens_per_step"] / row["step_s"], row["tokens_per_s"],
                            rel_tol=EXACT):  # fmt: skip
            yield "tokens/s is not tokens per step by step time"
        if row["needed_bytes"] > limit:
            yield "a layout that does not fit has a speed"
    if winner is None:
        return
    if answer["objective"] == "throughput":
        yield from _options(answer, winner)
    if answer["slack"]["memory_bytes"] not in _around(limit - winner["needed_bytes"]):
        yield "headroom is not usable memory less what is needed"
    for reason in answer["why"]:
        yield from _contradicts(answer, winner, reason)


def _contradicts(answer: Answer, winner: Answer, reason: Answer) -> Iterator[str]:
    """What is wrong with one reason."""
    match reason["kind"]:
        case "compared":
            yield from _compared(answer, winner, reason)
        case "does not fit" if reason["needed_bytes"] <= answer["limit_bytes"]:
            yield "what does not fit needs less than is usable"
        case "step batch" if reason["tokens"] != winner["tokens_per_step"]:
            yield "two figures of tokens per step"
        case "limited by" if reason["binding"] == "bandwidth":
            factor = answer["slack"]["network_factor"]
            if factor is not None and factor > 10 and reason["twice_link"] < VISIBLE:
                yield f"limited by bandwidth that could be {factor:.0f} times lower"


def _options(answer: Answer, winner: Answer) -> Iterator[str]:
    for row in answer["pareto"]:
        gain = row["tokens_per_s"] / winner["tokens_per_s"] - 1
        same = _degrees(row) == _degrees(winner)
        closer = row["tokens_per_step"] == winner["tokens_per_step"]
        if gain > VISIBLE and same and closer:
            yield f"an option of less memory is {gain:.1%} faster than the recommended one"


def _compared(answer: Answer, winner: Answer, reason: Answer) -> Iterator[str]:
    rows = [row for row in answer["layouts"] if row["strategy"] == reason["strategy"]]
    if not rows:
        yield "a layout is compared that no row has"
        return
    ratio = rows[0]["tokens_per_s"] / winner["tokens_per_s"] - 1
    if not math.isclose(ratio, reason["throughput"], abs_tol=EXACT):
        yield f"compared as {reason['throughput']:.1%}, the table says {ratio:.1%}"
    error = answer["comparison_interval"][1]
    if reason.get("too_close", False) != (abs(ratio) <= error) and "too_close" in reason:
        yield "too close to call by one figure and not by the other"


def _around(size: float) -> range:
    return range(int(size) - 2, int(size) + 3)


def _headroom(answer: Answer, winner: Answer) -> float:
    limit = float(answer["limit_bytes"])
    return (limit - float(winner["needed_bytes"])) / limit


def _devices(row: Answer) -> int:
    strategy = row["strategy"]
    return math.prod(int(strategy[axis] or 1) for axis in AXES)


def _degrees(row: Answer) -> tuple[int, int]:
    return row["strategy"]["tensor"], row["strategy"]["context"]
