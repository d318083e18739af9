"""Planted causes in synthetic traces are found, to the nanosecond; healthy ones get no verdict."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from shardwise.observe.diagnosis.communication import LateGathers, SlowLink, SmallMessages
from shardwise.observe.diagnosis.device import SlowMatmuls
from shardwise.observe.diagnosis.stragglers import LateRank, RanksOutOfStep, Straggler
from shardwise.observe.diagnosis.verdict import Health, Verdict
from shardwise.observe.diagnosis.verdicts import health_of, verdicts_of
from shardwise.observe.rules import Thresholds
from shardwise.observe.summary import Summary, summarise
from shardwise.spec.lookup import find_cluster
from tests.observe.synthetic import Built, Plan, build

HEALTHY = Plan(forward=4000, backward=8000)
US = 1000
TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"


def read(folder: Path, plan: Plan, offset: int = 0) -> tuple[Built, Summary]:
    built = build(folder, plan, offset)
    return built, summarise(built.paths)


def causes(summary: Summary) -> dict[str, Verdict]:
    return {_key(verdict): verdict for verdict in verdicts_of(summary)}


def _key(verdict: Verdict) -> str:
    operation = getattr(verdict, "operation", "")
    return f"{verdict.cause} {operation}" if operation else verdict.cause


def exposed_by_purpose(built: Built, rank: int) -> Counter[tuple[str, str]]:
    """Exposed microseconds by unit and role, counted one by one.

    Where collectives run at once, the microsecond belongs to the one that started last.
    """
    mine = [span for span in built.spans if span.rank == rank]
    busy = built.covered(rank, "compute", (0, 10**9))
    owner: dict[int, tuple[int, int]] = {}
    for number, span in enumerate(mine):
        if span.kind == "communication":
            for moment in range(span.start, span.end):
                if moment not in busy:
                    owner[moment] = max(owner.get(moment, (-1, -1)), (span.start, number))
    return Counter((mine[number].unit, mine[number].role) for _, number in owner.values())


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_healthy_run_gets_no_verdict(tmp_path: Path, ranks: int, micro_batches: int) -> None:
    plan = replace(HEALTHY, ranks=ranks, micro_batches=micro_batches)
    _, summary = read(tmp_path, plan, offset=777)
    assert verdicts_of(summary) == []
    assert all(rank.profiled.compute_ns > 0.97 * rank.profiled.window_ns for rank in summary.ranks)


@pytest.mark.parametrize(
    "plan",
    [
        HEALTHY,
        Plan(prefetched=False, gather=400, scatter=300),
        Plan(separate=False, gather=700, scatter=900, backward=1000),
        Plan(ranks=3, late={1: ("data", 4000)}, gather=300),
        Plan(host_gap=200, data=900, synchronised=500, malloc=300),
        Plan(micro_batches=2, blocks=5, gather=1500, scatter=2500),
    ],
)
def test_the_parts_of_every_rank_and_unit_are_exact(tmp_path: Path, plan: Plan) -> None:
    built, summary = read(tmp_path, plan)
    for number, rank in enumerate(summary.ranks):
        window = (built.windows[number][0][0], built.windows[number][-1][1])
        computing = built.covered(number, "compute", window)
        moving = built.covered(number, "communication", window)
        length = window[1] - window[0]
        assert rank.span == (window[0] * US, window[1] * US)
        assert rank.profiled.compute_ns == len(computing) * US
        assert rank.profiled.exposed_communication_ns == len(moving - computing) * US
        assert rank.profiled.idle_ns == (length - len(computing | moving)) * US
        assert rank.host.idle.total_ns == rank.profiled.idle_ns
        assert rank.exposed.per_call(len(rank.calls)).sum() == len(moving - computing) * US
        names = ["root", *(f"layers.{block}" for block in range(plan.blocks))]
        assert [unit.unit for unit in rank.units] == names
        alone = exposed_by_purpose(built, number)
        for unit in rank.units:
            for role, total, exposed in (
                ("gather forward", unit.gather_forward_ns, unit.gather_forward_exposed_ns),
                ("gather backward", unit.gather_backward_ns, unit.gather_backward_exposed_ns),
                ("scatter", unit.scatter_ns, unit.scatter_exposed_ns),
            ):
                assert total == built.total(number, unit.unit, role) * US
                assert exposed == alone[unit.unit, role] * US
            assert unit.forward_ns == built.total(number, unit.unit, "forward") * US
            assert unit.backward_ns == built.total(number, unit.unit, "backward") * US
        for one in rank.collectives:
            calls = [s for s in built.spans if s.rank == number and s.kind == "communication"
                     and (s.role == "scatter") == (one.operation == "reduce-scatter")]  # fmt: skip
            roles = {s.role for s in calls}
            assert one.calls == len(calls)
            assert one.total_ns == sum(s.end - s.start for s in calls) * US
            assert one.exposed_ns == US * sum(n for (_, role), n in alone.items() if role in roles)
            # Whole messages in two bytes a number, of two ranks at least.
            assert one.moved_bytes == len(calls) * plan.elements * max(plan.ranks, 2) * 2


def test_gathers_that_start_too_late_are_named(tmp_path: Path) -> None:
    """All but those that open a step wait for the compute before them: 15 + 16 gathers."""
    plan = Plan(prefetched=False, gather=400, scatter=50)
    _, summary = read(tmp_path, plan)
    verdict = verdicts_of(summary)[0]
    assert isinstance(verdict, LateGathers)
    # The first block's gather follows the root's, with no compute between.
    assert verdict.saves_ns == (15 + 16) * 400 * US
    assert (verdict.gathers, verdict.backward_gathers, verdict.units) == (31, 16, 16)
    assert "late_gathers" not in causes(read(tmp_path, replace(plan, prefetched=True))[1])


def test_gathers_behind_reduce_scatters_are_named(tmp_path: Path) -> None:
    """A gather asked for at the start of a backward runs after the last block's reduce-scatter.

    A backward lasts 1000, both together 1600: 600 are exposed. With a communicator of its own a
    gather would take 700 beside compute. Blocks 13 to 0 meet a reduce-scatter; two do not.
    """
    plan = Plan(separate=False, gather=700, scatter=900, backward=1000, forward=2000)
    _, summary = read(tmp_path, plan)
    found = causes(summary)
    verdict = found["queued_gathers"]
    assert verdict.saves_ns == 14 * 600 * US
    assert "queued_gathers" not in causes(read(tmp_path, replace(plan, separate=True))[1])


def test_a_slow_network_is_told_from_late_gathers(tmp_path: Path) -> None:
    """Gathers twice as long as the forward they hide behind, prefetched as far as they can be."""
    _, summary = read(tmp_path, Plan(gather=2000, scatter=50, forward=1000, backward=3000))
    found = causes(summary)
    assert next(iter(found)) == "exposed_communication all-gather"
    # Root, first block and first of the backward whole; fifteen blocks of the forward by half. Only
    # the first of the backward could have begun beside the last block of the forward.
    assert found["late_gathers"].saves_ns == 1000 * US
    assert found["exposed_communication all-gather"].saves_ns == (3 * 2000 + 15 * 1000 - 1000) * US


def test_small_messages_are_named(tmp_path: Path) -> None:
    """Messages of 64 KiB, back to back and longer than what they hide behind."""
    plan = Plan(gather=1500, scatter=60, forward=500, backward=1600, elements=16_384)
    _, summary = read(tmp_path, plan)
    verdict = verdicts_of(summary)[0]
    assert isinstance(verdict, SmallMessages)
    assert verdict.limit_bytes == 2**20
    # Two ranks of 16,384 elements of two bytes, in all of a step's gathers and reductions.
    assert verdict.median_bytes == 2 * 16_384 * 2
    assert verdict.all_calls == 1 + 2 * 16 + 17


def test_a_slow_link_is_named_where_the_cluster_is(tmp_path: Path) -> None:
    """200 MB in 20 ms over two ranks is 5 GB/s on a link of 450 GB/s."""
    plan = Plan(gather=20_000, scatter=100, forward=1000, backward=3000, blocks=4)
    _, summary = read(tmp_path, plan)
    cluster = find_cluster("1x2xH100-SXM")
    found = {v.cause: v for v in verdicts_of(summary, cluster=cluster)}
    first = found["slow_link"]
    assert isinstance(first, SlowLink)
    reached = (100e6 / 20e-3) / cluster.device.link_bandwidth
    assert first.operation == "all-gather"
    assert first.reached_share == pytest.approx(reached)
    assert not any(cause.startswith("slow_link") for cause in causes(summary))
    fast = replace(plan, gather=300, forward=200, backward=600)
    assert "slow_link" not in {v.cause for v in verdicts_of(read(tmp_path, fast)[1],
                                                            cluster=cluster)}  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "cause", "microseconds"),
    [
        (Plan(data=9000), "data_loading", 9000),
        (Plan(malloc=7000), "allocator", 7000),
        (Plan(limiter=8000), "rate_limiter", 8000),
        (Plan(synchronised=6000), "synchronisation", 6000),
        # Before each of 33 kernels, where no gather runs at that time.
        (Plan(host_gap=300, gather=10, scatter=10, forward=500), "launch_bound", None),
    ],
)  # fmt: skip
def test_what_the_host_does_is_told(
    tmp_path: Path, plan: Plan, cause: str, microseconds: int | None
) -> None:
    _, summary = read(tmp_path, plan)
    verdict = verdicts_of(summary)[0]
    assert verdict.cause == cause
    if microseconds is not None:
        assert verdict.saves_ns == microseconds * US
    else:
        assert verdict.saves_ns == summary.ranks[0].profiled.idle_ns / plan.steps


@pytest.mark.parametrize("share", [0.2, 0.5, 2.0])
@pytest.mark.parametrize("kind", ["data", "compute", "host"])
def test_a_straggler_is_named_with_its_reason(tmp_path: Path, kind: str, share: float) -> None:
    """Once a step rank 2 is late; the others wait for it in the root's or second gather."""
    plan = replace(HEALTHY, ranks=4, blocks=4)
    step = 4 * (plan.forward + plan.backward) + plan.optimizer
    late = round(share * step)
    _, summary = read(tmp_path, replace(plan, late={2: (kind, late)}), offset=12_345)
    verdict = verdicts_of(summary)[0]
    assert isinstance(verdict, Straggler)
    assert (verdict.ranks, verdict.reason) == (("rank 2",), kind)
    # Whenever ranks wait, at least once per step, it is for rank 2.
    assert verdict.last_to_arrive == verdict.collectives >= plan.steps
    assert verdict.spent_ns - verdict.others_spent_ns == pytest.approx(late * US, rel=0.02)
    assert summary.joined is not None
    assert summary.joined.offset_ns.tolist() == [0, -12_345_000, -24_690_000, -37_035_000]
    # What the others wait, by every microsecond of theirs that is not transfer, in the open.
    hidden = plan.gather if kind == "compute" else 0
    assert verdict.saves_ns == pytest.approx((late - hidden) * US, rel=0.02)


def test_every_late_rank_is_told_with_its_own_reason() -> None:
    late = (
        LateRank(name="rank 5", reason="data", spent_ns=2e7, others_spent_ns=1e6, last_to_arrive=7),
        LateRank(name="rank 2", reason="host", spent_ns=3e7, others_spent_ns=4e6, last_to_arrive=5),
    )
    one = Straggler(
        saves_ns=2e7, ranks=("rank 5", "rank 2"), late=late, reason="data", on_cpu=False,
        spent_ns=2e7, others_spent_ns=1e6, last_to_arrive=12, collectives=14, every_step=True,
    )  # fmt: skip
    health = Health(3, 1e8, 0.5, 1e7, None, False)
    words = one.explain(health)
    for rank in late:
        assert rank.name in words.fix
        assert f"{rank.spent_ns / 1e6:.1f} ms" in words.evidence
        assert str(rank.last_to_arrive) in words.evidence


def test_one_step_is_not_every_step(tmp_path: Path) -> None:
    plan = replace(HEALTHY, ranks=4, blocks=4, steps=1, late={2: ("host", 15_000)})
    _, summary = read(tmp_path, plan)
    (verdict,) = [one for one in verdicts_of(summary) if isinstance(one, Straggler)]
    assert not verdict.every_step
    assert "every step" not in verdict.explain(health_of(summary, Thresholds())).result


@pytest.mark.parametrize(("steps", "named"), [(3, False), (12, True)])
def test_a_few_noisy_steps_name_no_straggler(tmp_path: Path, steps: int, named: bool) -> None:
    """A rank that is late in all steps but one: of three steps that may be chance."""
    late = {2: ("host", 15_000)}
    plan = replace(HEALTHY, ranks=4, blocks=4, steps=steps, late=late, on_time=(1,))
    _, summary = read(tmp_path, plan)
    found = [one for one in verdicts_of(summary) if isinstance(one, Straggler | RanksOutOfStep)]
    assert [isinstance(one, Straggler) for one in found] == [named]


def test_lateness_that_takes_turns_names_no_straggler(tmp_path: Path) -> None:
    """Each of four ranks makes the others wait in a quarter of the steps: none of them is slow."""
    plan = replace(HEALTHY, ranks=4, blocks=4, steps=12, in_turn=("host", 15_000))
    _, summary = read(tmp_path, plan)
    found = causes(summary)
    assert "straggler" not in found
    # In each step, three ranks of four wait as long as one is late.
    assert found["ranks_out_of_step"].saves_ns == pytest.approx(15_000 * US * 3 / 4, rel=0.02)


@pytest.mark.parametrize("ranks", [4, 8])
def test_each_late_rank_is_named_with_its_own_figures(tmp_path: Path, ranks: int) -> None:
    """One loads data, and makes the others wait longer; one computes for long, and is last more
    often: at the three gathers after its slow block, but once at the first."""
    late = {1: ("data", 9_000), 2: ("compute", 7_000)}
    _, summary = read(tmp_path, replace(HEALTHY, ranks=ranks, blocks=4, late=late))
    (verdict,) = [one for one in verdicts_of(summary) if isinstance(one, Straggler)]
    guilty = {
        rank.name
        for rank in summary.ranks
        if rank.host.data_ns or rank.profiled.compute_ns > summary.ranks[0].profiled.compute_ns
    }
    assert set(verdict.ranks) == guilty == {"rank 1", "rank 2"}
    computing = 4 * (HEALTHY.forward + HEALTHY.backward) + HEALTHY.optimizer
    assert {one.name: (one.reason, one.spent_ns, one.others_spent_ns) for one in verdict.late} == {
        "rank 1": ("data", 9_000 * US, 0),
        "rank 2": ("compute", (computing + 7_000) * US, computing * US),
    }
    assert sum(one.last_to_arrive for one in verdict.late) == verdict.collectives
    last = {one.name: one.last_to_arrive for one in verdict.late}
    assert last["rank 2"] > last["rank 1"] >= HEALTHY.steps
    # The two are late at different gathers: both times are waited for, but what a gather hides.
    assert verdict.saves_ns == pytest.approx((9_000 + 7_000) * US, rel=0.1)


def test_a_straggler_among_ranks_that_are_late_in_turn_is_named_alone(tmp_path: Path) -> None:
    """It causes 54 % of the waiting, each of seven others 7 %: two together pass 60 %."""
    plan = replace(
        HEALTHY, ranks=8, blocks=4, steps=16, late={0: ("compute", 7_000)}, in_turn=("host", 6_800)
    )
    _, summary = read(tmp_path, plan)
    (verdict,) = [one for one in verdicts_of(summary) if isinstance(one, Straggler)]
    assert (verdict.ranks, verdict.reason, verdict.every_step) == (("rank 0",), "compute", True)


@pytest.mark.skipif(not TRACES.exists(), reason="needs the traces beside the project")
def test_the_ranks_that_a_table_shows_guilty_are_those_named() -> None:
    """Of eight A100: two ranks idle 20 times as long as the others and arrive last most often."""
    paths = sorted((TRACES / "megatron_tp8_8rank").glob("*.json.gz"))
    summary = summarise(paths)
    assert summary.joined is not None
    (verdict,) = [one for one in verdicts_of(summary) if isinstance(one, Straggler)]
    idle = {rank.name: rank.profiled.idle_ns for rank in summary.ranks}
    guilty = {name for name in idle if idle[name] > 10 * median(idle.values())}
    assert set(verdict.ranks) == guilty == {"rank 0", "rank 6"}
    assert {one.name: one.last_to_arrive for one in verdict.late} == {"rank 0": 32, "rank 6": 34}
    assert all(one.spent_ns == idle[one.name] for one in verdict.late)


def test_thresholds_decide_what_is_healthy(tmp_path: Path) -> None:
    _, summary = read(tmp_path, HEALTHY)
    strict = Thresholds(compute=1.0, least=0.0)
    assert verdicts_of(summary, strict)
    _, slow = read(tmp_path, Plan(data=9000))
    assert verdicts_of(slow, Thresholds(compute=0.1)) == []
    assert verdicts_of(slow, Thresholds(least=0.5)) == []


def test_micro_batches_that_reduce_are_told_from_those_that_do_not(tmp_path: Path) -> None:
    plan = Plan(micro_batches=4, blocks=3, steps=2)
    _, summary = read(tmp_path, plan)
    adding, reducing = summary.ranks[0].micro_batches
    assert (adding.reduces, adding.number, reducing.reduces, reducing.number) == (False, 6, True, 2)
    # Three blocks gathered twice, the root once.
    assert adding.gathers == 6 * 7
    assert adding.reductions == 0
    assert reducing.gathers == 2 * 7
    assert reducing.reductions == 2 * 4


def test_compute_beside_communication_is_compared_with_itself_alone(tmp_path: Path) -> None:
    """Forty kernels of one name alone, forty beside a collective and a quarter longer."""
    events = []
    for number in range(80):
        start, length = 1000 + number * 200.0, 100.0 if number % 2 else 125.0
        rows = [("gemm", 7, start, length)]
        if not number % 2:
            rows.append(("ncclAllGather", 20, start - 5, 150.0))
        # Runs of many sizes under one name say nothing.
        rows.append(("mixed", 7, start + 170, 1.0 + number % 9))
        events += [{"ph": "X", "cat": "kernel", "name": name, "pid": 0, "tid": stream, "ts": begin,
                    "dur": lasted, "args": {"device": 0, "stream": stream, "correlation": -1}}
                   for name, stream, begin, lasted in rows]  # fmt: skip
    path = tmp_path / "t.json"
    path.write_text(json.dumps(events))
    slowdown = summarise([path]).ranks[0].slowdown
    assert slowdown == (1.25, 40, 40 * 125_000)


def test_matrix_products_are_held_against_the_peak(tmp_path: Path) -> None:
    """A product of 4096 cubed in bf16 takes 2 x 4096^3 operations; 2 ms make 69 TFLOP/s."""
    size, events = 4096, []
    for number in range(20):
        begin = number * 2000.0
        shared = {"ph": "X", "pid": 1, "tid": 1}
        events += [
            {**shared, "cat": "cpu_op", "name": "aten::mm", "ts": begin, "dur": 20.0,
             "args": {"Input Dims": [[size, size], [size, size]],
                      "Input type": ["c10::BFloat16", "c10::BFloat16"]}},
            {**shared, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": begin + 5,
             "dur": 5.0, "args": {"correlation": number}},
            {**shared, "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": begin + 10,
             "dur": 1900.0, "args": {"device": 0, "stream": 7, "correlation": number}},
        ]  # fmt: skip
    path = tmp_path / "t.json"
    path.write_text(json.dumps(events))
    summary = summarise([path])
    product = summary.ranks[0].matmul
    assert product is not None
    assert product.flops_per_s == pytest.approx(2 * size**3 / 1900e-6)
    cluster = find_cluster("8xH100-SXM")
    (verdict,) = verdicts_of(summary, Thresholds(compute=0.99), cluster)[:1]
    assert isinstance(verdict, SlowMatmuls)
    share = 2 * size**3 / 1900e-6 / (cluster.device.peak_flops("bf16") or 0)
    assert verdict.reached_share == pytest.approx(share)
    assert (verdict.calls, verdict.dtype, verdict.device) == (20, "bf16", "H100-SXM")
    assert verdict.saves_ns == pytest.approx(20 * 1_900_000 * (1 - share / 0.5))
