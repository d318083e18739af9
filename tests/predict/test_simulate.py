"""The schedule of a step against an explicit event queue, and the laws it must obey."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.predict.configurations import Floats
from shardwise.predict.time import Times, schedule
from tests.examples import examples
from tests.predict.blocks import (
    PER_BLOCK,
    SCALARS,
    Given,
    Rules,
    Seconds,
    emitted,
    rules,
    simulate,
    uniform,
    unrolled,
)

# ---- the reference: operations with a stream and with what they wait for -----------------------


@dataclass
class Operation:
    stream: str
    seconds: float
    after: list[Operation] = field(default_factory=list)
    end: float = -1.0


class Queue:
    """Streams run their operations in the order issued, each when all it waits for is done."""

    def __init__(self) -> None:
        self.issued: list[Operation] = []

    def issue(self, stream: str, seconds: float, *after: Operation | None) -> Operation:
        operation = Operation(stream, seconds, [a for a in after if a is not None])
        self.issued.append(operation)
        return operation

    def run(self) -> float:
        pending = list(self.issued)
        free: dict[str, float] = {}
        while pending:
            heads: dict[str, Operation] = {}
            for operation in pending:
                heads.setdefault(operation.stream, operation)
            ready = [o for o in heads.values() if all(a.end >= 0 for a in o.after)]
            assert ready, "deadlock"
            for operation in ready:
                start = max([free.get(operation.stream, 0.0), *(a.end for a in operation.after)])
                operation.end = start + operation.seconds
                free[operation.stream] = operation.end
                pending.remove(operation)
        return max((o.end for o in self.issued), default=0.0)


def reference(d: dict[str, Any], r: dict[str, Any]) -> float:
    """One configuration, told as the engine's host issues it."""
    q, n, k = Queue(), len(d["forward"]), r["accumulate"]
    scatter_stream = "reductions" if r["separate"] else "collectives"
    returned: Operation | None = None
    last: Operation | None = None
    for number in range(k):
        gathers = number == 0 or r["gathers_every"]
        final = number == k - 1
        scatters, reduces = final or r["scatters_every"], final or r["reduces_every"]

        def gather(seconds: float, after: Operation | None) -> Operation | None:
            return q.issue("collectives", seconds, after) if seconds > 0 else None

        done = gather(d["root_gather"], last) if gathers else None
        root = q.issue("compute", d["root_copy_out"] if gathers else 0.0, done, last)
        copied = [root]
        for i in range(n):
            waits_for = copied[max(i - r["forward_prefetch"], 0)]
            done = gather(d["gather"][i], waits_for) if gathers else None
            copied.append(q.issue("compute", d["copy_out"][i] if gathers else 0.0, done))
            last = q.issue("compute", d["forward"][i])
        last = q.issue("compute", d["root_forward"])

        ahead: dict[int, Operation | None] = {}
        for step in range(1, r["prefetch"] + 1):
            if n - step >= 0:
                ahead[n - step] = gather(d["gather_again"][n - step], last)
        last = q.issue("compute", d["root_backward"])
        if reduces and d["head_reduce"] > 0:
            q.issue("all-reduce", d["head_reduce"], last)

        def scatter(copy: float, seconds: float, across: float) -> None:
            nonlocal returned, last
            moves = scatters and seconds > 0
            last = q.issue("compute", copy if scatters else 0.0, returned if moves else None)
            made = last
            if moves:
                made = returned = q.issue(scatter_stream, seconds, last)
            if reduces and across > 0:
                q.issue("all-reduce", across, made)

        for i in reversed(range(n)):
            if r["prefetch"] == 0:
                ahead[i] = gather(d["gather_again"][i], last)
            copy = d["copy_out"][i] if d["gather_again"][i] > 0 else 0.0
            last = q.issue("compute", copy, ahead.get(i))
            if r["prefetch"] and i - r["prefetch"] >= 0:
                ahead[i - r["prefetch"]] = gather(d["gather_again"][i - r["prefetch"]], last)
            last = q.issue("compute", d["backward"][i])
            scatter(d["copy_in"][i], d["scatter"][i], d["reduce"][i])
        scatter(d["root_copy_in"], d["root_scatter"], d["root_reduce"])
        if r["joins"]:
            reductions = [o for o in q.issued if o.stream == "all-reduce"]
            last = q.issue("compute", 0.0, *reductions[-1:])
    return q.run() + d["optimizer"]


# ---- random configurations -----------------------------------------------------------------

SECONDS = st.floats(0.001, 5.0)


@st.composite
def configuration(draw: Any, blocks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    kinds = draw(st.sampled_from(["zero3", "zero2", "ddp", "hybrid"]))
    d: dict[str, Any] = {}
    for name in PER_BLOCK:
        off = (name.startswith("gather") or name in ("scatter", "copy_out", "copy_in")) and (
            kinds == "ddp"
        )
        off = off or (name == "gather_again" and kinds == "zero2")
        off = off or (name == "reduce" and kinds not in ("ddp", "hybrid"))
        d[name] = [0.0 if off else draw(SECONDS) for _ in range(blocks)]
    for name in SCALARS:
        off = kinds == "ddp" and name in (
            "root_gather",
            "root_scatter",
            "root_copy_out",
            "root_copy_in",
        )
        off = off or (name == "root_reduce" and kinds not in ("ddp", "hybrid"))
        off = off or (name == "head_reduce" and kinds != "ddp")
        d[name] = 0.0 if off else draw(SECONDS)
    scatters = draw(st.booleans())
    r = {
        "prefetch": draw(st.integers(0, 3)),
        "forward_prefetch": draw(st.integers(0, 2)),
        "separate": draw(st.booleans()),
        "waits": False,
        "joins": kinds == "ddp",
        "contention": 0.0,
        "accumulate": draw(st.integers(1, 6)),
        "gathers_every": draw(st.booleans()),
        "scatters_every": scatters,
        # What was not scattered cannot be summed across replicas; DDP scatters nothing.
        "reduces_every": draw(st.booleans()) and (scatters or kinds == "ddp"),
    }
    return d, r


def columns(rows: list[tuple[dict[str, Any], dict[str, Any]]]) -> tuple[Seconds, Rules]:
    d = {name: np.asarray([row[0][name] for row in rows], dtype=float) for name in rows[0][0]}
    r = {name: np.asarray([row[1][name] for row in rows]) for name in rows[0][1]}
    return d, r


@examples(120)
@given(st.integers(1, 7).flatmap(lambda n: st.lists(configuration(n), min_size=1, max_size=6)))
def test_it_is_what_an_event_queue_finds(
    rows: list[tuple[dict[str, Any], dict[str, Any]]],
) -> None:
    """Several rows at once: they must not influence each other."""
    times = simulate(*columns(rows))
    for index, (d, r) in enumerate(rows):
        assert times.step_s[index] == pytest.approx(reference(d, r), rel=1e-9)
    parts = times.compute_s + times.copy_s + times.exposed_communication_s + times.optimizer_s
    assert parts == pytest.approx(times.step_s, rel=1e-12)
    assert (times.exposed_communication_s >= -1e-9).all()


@st.composite
def repeated(draw: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """A few kinds of blocks, each many times over, as models have them."""
    kinds = draw(st.integers(1, 3))
    d, r = draw(configuration(kinds))
    counts = [draw(st.integers(1, 25)) for _ in range(kinds)]
    for name in PER_BLOCK:
        d[name] = [
            value for value, count in zip(d[name], counts, strict=True) for _ in range(count)
        ]
    return d, r


@examples(150)
@given(repeated())
def test_blocks_that_repeat_are_not_played_one_by_one_and_nothing_changes(
    row: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    times = simulate(*columns([row]))
    assert times.step_s[0] == pytest.approx(reference(*row), rel=1e-9)


@examples(400)
@given(repeated(), st.floats(0.0, 0.5))
def test_skipping_is_exact_under_contention_too(
    row: tuple[dict[str, Any], dict[str, Any]], contention: float
) -> None:
    d, r = columns([(row[0], {**row[1], "contention": contention})])
    program, prices = emitted(d, r), Given(d, r)
    quick, slow = schedule(program, (1,), prices), schedule(unrolled(program), (1,), prices)
    for one, other in zip(all_seconds(quick), all_seconds(slow), strict=True):
        assert one[0] == pytest.approx(other[0], rel=1e-9, abs=1e-9 * slow.step_s[0])


def all_seconds(times: Times) -> list[Floats]:
    """Every column of seconds, those of exchanges inside blocks too."""
    *plain, inside = (getattr(times, field.name) for field in fields(times))
    return [*plain, *inside.values()]


# ---- laws ----------------------------------------------------------------------------------


def test_without_prefetch_every_gather_of_the_backward_is_exposed() -> None:
    n, f, g, s = 10, 3.0, 1.0, 0.5
    d = uniform(n, forward=f, backward=2 * f, gather=g, gather_again=g, scatter=s, root_gather=g)
    times = simulate(d, rules(prefetch=0))
    # Forward: the root's and the first block's gather; backward: each gather, and each but the
    # last scatter ahead of it in the queue; then the last scatter.
    closed = g + g + n * g + (n - 1) * s + s
    assert times.exposed_communication_s[0] == pytest.approx(closed, rel=1e-12)


def test_bandwidth_bound_steps_scale_with_bandwidth() -> None:
    d = uniform(80, forward=1e-3, backward=2e-3, gather=1.0, gather_again=1.0, scatter=1.0)
    whole = simulate(d, rules()).step_s[0]
    half = {name: d[name] / 2 for name in ("gather", "gather_again", "scatter")}
    halved = simulate(d | half, rules()).step_s[0]
    assert whole / halved == pytest.approx(2.0, rel=2e-3)


def test_a_group_of_its_own_makes_a_maximum_of_a_sum() -> None:
    n, c = 60, 1.0
    d = uniform(n, backward=1e-6, gather_again=c, scatter=c)
    together = simulate(d, rules()).step_s[0]
    apart = simulate(d, rules(separate=True)).step_s[0]
    assert together == pytest.approx(2 * n * c, rel=0.01)
    assert apart == pytest.approx(n * c, rel=0.05)


def test_hidden_communication_costs_nothing_but_contention() -> None:
    n = 20
    d = uniform(n, forward=5.0, backward=10.0, gather=1.0, gather_again=1.0, scatter=1.0)
    free = simulate(d, rules()).step_s[0]
    slowed = simulate(d, rules(contention=0.1)).step_s[0]
    # All but the first gather of each pass and the last scatter are hidden.
    assert free == pytest.approx(n * 15.0 + 1.0 + 1.0 + 1.0, rel=1e-12)
    overlapped = 2 * (n - 1) * 1.0 + (n - 1) * 1.0
    assert slowed - free == pytest.approx(0.1 * overlapped, rel=0.1)


def test_middle_micro_batches_repeat() -> None:
    d = uniform(6, forward=1.0, backward=2.0, gather=0.5, gather_again=0.5, scatter=0.7,
                root_gather=0.2, root_scatter=0.3)  # fmt: skip
    steps = [simulate(d, rules(accumulate=k)).step_s[0] for k in (2, 3, 4, 9)]
    one = steps[1] - steps[0]
    assert steps[2] - steps[1] == pytest.approx(one, rel=1e-9)
    assert steps[3] - steps[2] == pytest.approx(5 * one, rel=1e-9)


@examples(60)
@given(st.integers(1, 7).flatmap(lambda n: st.lists(configuration(n), min_size=1, max_size=6)))
def test_who_waits_for_every_collective_takes_the_sum_of_all(
    rows: list[tuple[dict[str, Any], dict[str, Any]]],
) -> None:
    d, r = columns(rows)
    waiting = simulate(d, r | {"waits": np.ones(len(rows), dtype=np.bool_)})
    for index, (pieces, rule) in enumerate(rows):
        k = rule["accumulate"]
        gathers, scatters, reduces = (
            k if rule[name] else 1 for name in ("gathers_every", "scatters_every", "reduces_every")
        )
        counts = {
            "forward": k, "backward": k, "root_forward": k, "root_backward": k, "optimizer": 1,
            "gather": gathers, "root_gather": gathers, "copy_out": gathers, "gather_again": k,
            "root_copy_out": gathers,
            "scatter": scatters, "root_scatter": scatters, "copy_in": scatters,
            "root_copy_in": scatters, "reduce": reduces, "root_reduce": reduces,
            "head_reduce": reduces,
        }  # fmt: skip
        total = sum(np.sum(pieces[name]) * times for name, times in counts.items())
        again = np.where(np.asarray(pieces["gather_again"]) > 0, pieces["copy_out"], 0.0)
        assert waiting.step_s[index] == pytest.approx(total + k * again.sum(), rel=1e-12)
