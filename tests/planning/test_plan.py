"""What a practitioner expects of a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import pytest

import shardwise
from shardwise.planning.api import plan_run
from shardwise.planning.batches import LARGE_BATCH, USUAL_BATCH
from shardwise.planning.layout import Layout
from shardwise.planning.make import FAST_ENOUGH, make_plan
from shardwise.planning.money import Budget
from shardwise.planning.plan import Plan
from shardwise.planning.reasons.layout import Compared, DoesNotFit, NetworkCrossover, StatesFit
from shardwise.planning.reasons.limits import (
    Alternative,
    CompressionGain,
    LimitedBy,
    LowPrecisionReduce,
    OtherParallelism,
    RiskyAlternative,
)
from shardwise.planning.reasons.reason import Reason
from shardwise.planning.reasons.settings import DataParallelEnds, LargeBatch, StepBatch
from shardwise.planning.reasons.warnings import (
    BeyondPositions,
    DecimalLength,
    LeastMemory,
    LongestSequence,
    StackLeavesOut,
    UnfittedExperts,
    UnquantizedExperts,
)
from shardwise.planning.rows import Candidate
from shardwise.planning.space import Space
from shardwise.predict.api import estimate_run
from shardwise.report.estimate_words import NOTHING_FITS
from shardwise.spec.adapter import Adapter, with_adapter
from shardwise.spec.lookup import find_cluster, write_cluster
from shardwise.spec.mesh import Mesh
from shardwise.spec.question import describe_run
from shardwise.spec.record import SpecError
from tests.command import shardwise as command
from tests.screens import assert_screen

R = TypeVar("R", bound=Reason)


def plan(model: str, cluster: str, **settings: Any) -> Plan:
    return shardwise.plan(model, cluster, **settings)


def winner(found: Plan) -> Candidate:
    assert found.winner is not None
    return found.winner


def reasons(found: Plan, kind: type[R]) -> list[R]:
    told = (*found.why, *found.limits_why, *found.tips)
    return [reason for reason in told if isinstance(reason, kind)]


def test_what_fits_each_of_4_gpus_is_told_not_to_shard() -> None:
    found = plan("llama-3-8b", "4xA100-80GB", adapter="lora:16")
    assert winner(found).strategy.kind == "ddp"
    (fits,) = reasons(found, StatesFit)
    # 2 bytes of 8.03 billion frozen parameters; 16 of the 42 million of the adapters.
    assert fits.state_bytes == pytest.approx(2 * 8.03e9 + 16 * 42e6, rel=1e-2)


def test_a_model_that_fits_no_device_is_sharded_and_told_why() -> None:
    found = plan("llama-3-70b", "64x8xH100-SXM@400Gbps")
    best = winner(found)
    assert best.strategy.kind == "zero3"
    (ddp,) = found.baselines
    assert ddp.candidate is None
    # 70.55 billion parameters at 16 bytes are 1,051 GiB.
    assert ddp.needed_bytes > 1051 * 2**30
    refused = {reason.strategy.kind: reason for reason in reasons(found, DoesNotFit)}
    assert refused["ddp"].needed_bytes == ddp.needed_bytes
    # Sharded states and 2 bytes of every parameter, gathered.
    assert refused["zero2"].needed_bytes > 2 * 70.55e9
    assert all(reason.usable_bytes == found.limit_bytes for reason in refused.values())


BATCH = {"global_batch": 64 * 4096 * 16}


@pytest.mark.parametrize(
    ("model", "nodes", "rate", "direction"),
    [
        ("llama-3-8b", "2x8xH100-SXM", 80, "above"),
    ],
)
def test_the_choice_between_groups_and_all_devices_changes_at_the_network_it_names(
    model: str, nodes: str, rate: int, direction: str
) -> None:
    batch = 2 * 16 * 4096
    here = plan(model, f"{nodes}@{rate}Gbps", global_batch=batch)
    assert winner(here).strategy.hybrid == (direction == "above")
    (turn,) = reasons(here, NetworkCrossover)
    assert turn.direction == direction
    named = turn.network * 8e-9
    # Networks farther away than that are no news.
    assert rate / 4.2 <= named <= rate * 4.2
    beyond = named * (1.1 if direction == "above" else 0.9)
    there = winner(plan(model, f"{nodes}@{beyond:.1f}Gbps", global_batch=batch))
    assert there.strategy.hybrid == (direction == "below")


def test_the_binding_constraint_binds() -> None:
    """Twice the network helps a run that is told to be limited by it, by what it was told."""
    slow = plan("llama-3-8b", "8x8xH100-SXM@10Gbps", **BATCH)
    assert slow.limits is not None
    assert slow.limits.binding == "bandwidth"
    (limited,) = reasons(slow, LimitedBy)
    assert (limited.binding, limited.link) == ("bandwidth", "network")
    faster = winner(plan("llama-3-8b", "8x8xH100-SXM@20Gbps", **BATCH))
    gain = faster.tokens_per_s / winner(slow).tokens_per_s - 1
    # Planned anew it gains at least what the same configuration does, but for ties.
    assert gain >= slow.limits.twice_network - 0.03


def test_a_layout_that_hardly_communicates_is_not_limited_by_bandwidth() -> None:
    """Another layout would be faster with twice the links; this one would not."""
    found = plan("llama-3-70b", "8xH100-SXM", adapter="qlora:16")
    assert found.limits is not None
    (limited,) = reasons(found, LimitedBy)
    assert max(limited.twice_network, limited.twice_link, limited.waiting_share) < 0.01
    assert found.limits.binding != "bandwidth"


def test_an_offloaded_optimizer_limits_a_run_and_a_larger_batch_helps() -> None:
    found = plan("llama-3-8b", "1xH100-SXM", offload="optimizer", global_batch=2**16)
    (limited,) = reasons(found, LimitedBy)
    best = winner(found)
    assert limited.binding == "optimizer"
    assert limited.optimizer_share == best.optimizer_s / best.step_s > 0.5
    # The update is paid once for four times the tokens.
    paid_once = 4 * best.step_s / (4 * best.step_s - 3 * best.optimizer_s) - 1
    assert limited.larger_batch == pytest.approx(paid_once, rel=0.02)


def test_an_adapter_on_weights_in_fp32_is_told_of_smaller_ones() -> None:
    """TRL loads a model that is given by its name in fp32."""
    adapter = Adapter(rank=8, alpha=4.0, dropout=0.1, base="fp32")
    found = plan("llama-3-8b", "1xA100-40GB", seq_len=8192, adapter=adapter)
    assert found.winner is None
    smaller = {one.value: one for one in reasons(found, Alternative)}
    assert set(smaller) >= {"lora:8", "qlora:8"}
    assert all(one.needed_bytes <= found.limit_bytes for one in smaller.values())
    # Asked for by that name, all else of the adapter is kept.
    assert with_adapter(adapter, "lora:8") == adapter.but(base="bf16")


def test_latency_is_told_from_bandwidth() -> None:
    """Collectives of 8,192 nodes wait for their messages to travel, not for their bytes."""
    asked = {"seq_len": 8192, "global_batch": 64 * 2**20, "for_stack": "megatron-bridge"}
    problem = plan("llama-3.1-405b", "8192x8xH100-SXM@400Gbps", **asked).problem
    # The stack shards over all devices; its plan without pipelines is withheld.
    flat = Space(allowed=lambda s: s.kind == "zero3" and not s.hybrid)
    found = make_plan(problem, space=flat.quick())
    (limited,) = reasons(found, LimitedBy)
    assert limited.binding == "latency"
    assert limited.waiting_share > 0.5
    # So twice the bandwidth brings little.
    assert limited.twice_network < 0.1
    (other,) = reasons(found, OtherParallelism)
    assert other.parallelism == ("pipeline",)


def test_nothing_is_recommended_for_a_stack_without_what_it_is_made_of() -> None:
    """Megatron without pipelines would wait for most of each step; with few devices it need not."""
    asked = {"seq_len": 8192, "for_stack": "megatron-bridge"}
    found = plan("llama-3.1-405b", "2048x8xH100-SXM@400Gbps", global_batch=16 * 2**20, **asked)
    assert found.winner is None
    assert found.withheld
    first = found.warnings[0]
    assert isinstance(first, StackLeavesOut)
    assert (first.parallelism, first.recommended) == (("pipeline",), False)
    assert first.waiting_share > 0.5
    assert first.mfu is not None
    assert first.mfu < 0.1
    small = plan("llama-3.1-8b", "8xH100-SXM", **asked)
    assert small.winner is not None
    assert isinstance(small.warnings[0], StackLeavesOut)
    assert small.warnings[0].recommended


def test_one_device_is_not_told_of_parallelism() -> None:
    assert not reasons(plan("llama-3-70b", "1xH100-SXM"), OtherParallelism)


def test_slack_is_what_is_left() -> None:
    found = plan("llama-3-8b", "8x8xH100-SXM@400Gbps")
    assert found.limits is not None
    assert found.limits.free_bytes == pytest.approx(
        found.limit_bytes - winner(found).needed_bytes, rel=1e-9
    )
    factor = found.limits.network_slack
    assert factor is not None
    strategy = winner(found).strategy
    settings = strategy.model_dump(exclude={"within_node"})
    steps = []
    for rate in (400, 400 / factor):
        time = shardwise.estimate(
            "llama-3-8b", f"8x8xH100-SXM@{rate:.3f}Gbps", shardwise.Strategy(**settings)
        ).time
        assert time is not None
        steps.append(time.step_s)
    assert steps[1] / steps[0] == pytest.approx(1.05, abs=0.01)


@pytest.mark.parametrize(
    ("model", "cluster"), [("llama-3-8b", "8xH100-SXM"), ("gpt2-xl", "2x8xA100-40GB@100Gbps")]
)
def test_least_memory_is_the_least_that_is_fast_enough(model: str, cluster: str) -> None:
    fast = plan(model, cluster)
    small = plan(model, cluster, objective="memory")
    aim = small.aim
    assert isinstance(aim, LeastMemory)
    assert winner(small).needed_bytes < winner(fast).needed_bytes
    assert aim.fastest_tokens_per_s >= winner(fast).tokens_per_s
    threshold = FAST_ENOUGH * aim.fastest_tokens_per_s
    assert winner(small).tokens_per_s >= threshold
    # Whatever takes less memory is too slow; the list and the choice agree.
    assert all(c.tokens_per_s < threshold for c in small.front)
    assert all(c.needed_bytes < winner(small).needed_bytes for c in small.front)


def test_the_longest_sequence_is_the_longest() -> None:
    found = plan("llama-3-8b", "8xH100-SXM", objective="sequence")
    length = found.problem.job.seq_len
    assert isinstance(found.aim, LongestSequence)
    assert (found.aim.tokens, found.aim.limited_by) == (length, "memory")
    assert winner(found).strategy.micro_batch == 1
    longer = plan("llama-3-8b", "8xH100-SXM", seq_len=length + 1024)
    assert longer.winner is None


def test_money_prefers_fewer_devices_unless_time_runs_out() -> None:
    asked = ("llama-3.2-1b", "4x2xA100-80GB@50Gbps")
    cheap = plan(*asked, objective="money", global_batch=2**17)
    assert cheap.problem.cluster.devices < 8
    tokens = 1e12
    hurry = Budget(tokens=tokens, price=2.0, deadline_s=tokens / winner(cheap).tokens_per_s / 1.5)
    quick = plan(*asked, objective="money", global_batch=2**17, budget=hurry)
    assert quick.problem.cluster.devices > cheap.problem.cluster.devices
    assert tokens / winner(quick).tokens_per_s <= (hurry.deadline_s or 0)
    cost = quick.cost(winner(quick))
    hours = tokens / winner(quick).tokens_per_s * quick.problem.cluster.devices / 3600
    assert cost.device_hours == pytest.approx(hours)
    assert cost.money == pytest.approx(2.0 * hours)


def test_the_longest_sequence_says_what_keeps_it() -> None:
    by_batch = plan("llama-3-8b", "8xA100-80GB", objective="sequence", global_batch=2**16)
    assert isinstance(by_batch.aim, LongestSequence)
    # All devices share one sequence of the whole batch; 3/4 of one is rounded up.
    assert by_batch.aim.limited_by == "input"
    assert 2**16 <= by_batch.aim.tokens <= 2**16 / 0.75
    assert winner(by_batch).strategy.mesh.inner == 8
    learned = plan("gpt2", "8xA100-80GB", objective="sequence")
    assert learned.problem.job.seq_len == 1024
    assert isinstance(learned.aim, LongestSequence)
    assert learned.aim.limited_by == "input"


def test_lower_memory_options_are_lower_and_slower() -> None:
    found = plan("llama-3-8b", "8xA100-80GB")
    sizes = [winner(found).needed_bytes, *(c.needed_bytes for c in found.front)]
    assert len(sizes) > 2
    assert sizes == sorted(sizes, reverse=True)


def test_what_is_at_risk_is_faster_and_beyond_the_usable_memory() -> None:
    tight = plan("llama-3.1-405b", "2048x8xH100-SXM@400Gbps", global_batch=2**26)
    for tip in reasons(tight, RiskyAlternative):
        assert tip.needed_bytes > tight.limit_bytes
        assert tip.gain is None or tip.gain > 0


def test_a_run_moves_to_another_cluster() -> None:
    _, run = plan_run("llama-3-8b", "8xH100-SXM")
    assert run is not None
    found, _ = plan_run(run=run, cluster="2x8xA100-80GB@200Gbps")
    assert winner(found).strategy.devices == 16


def test_where_nothing_fits_it_says_what_would() -> None:
    found = plan("llama-3.1-405b", "8xH100-SXM")
    assert found.winner is None
    assert found.ways
    assert any("--cluster" in way.options for way in found.ways)
    assert any("--offload" in way.options for way in found.ways)
    smaller = plan("llama-3-70b", "8xH100-SXM")
    assert smaller.winner is None
    (tip,) = (one for one in reasons(smaller, Alternative) if one.change == "offload")
    assert tip.strategy.offload
    assert tip.needed_bytes <= smaller.limit_bytes
    assert tip.tokens_per_s > 0


@pytest.mark.parametrize(
    ("model", "cluster", "adapters"),
    [
        ("llama-3-70b", "8xH100-SXM", ["lora:16", "qlora:16"]),
        ("llama-3-70b", "8xRTX-4090", ["qlora:16"]),
        ("llama-3.1-405b", "1xRTX-4090", []),
    ],
)
def test_where_all_parameters_do_not_fit_an_adapter_may(
    model: str, cluster: str, adapters: list[str]
) -> None:
    """Its figures are those of `plan --adapter`, but for the settings that bring little."""
    found = plan(model, cluster)
    tips = [tip for tip in reasons(found, Alternative) if tip.change == "adapter"]
    assert sorted(tip.value for tip in tips) == adapters
    for tip in tips:
        adapted = plan(model, cluster, adapter=tip.value)
        ratio = tip.tokens_per_s / winner(adapted).tokens_per_s
        assert ratio == pytest.approx(1, abs=adapted.comparison_error)
        assert tip.needed_bytes <= adapted.limit_bytes


def test_no_adapter_is_proposed_where_one_is_set_or_none_is_needed() -> None:
    def proposed(found: Plan) -> bool:
        return any(tip.change == "adapter" for tip in reasons(found, Alternative))

    tight = plan("llama-3.1-405b", "1xRTX-4090", adapter="lora:16")
    assert tight.winner is None
    assert not proposed(tight)
    assert not proposed(plan("gpt2", "1xRTX-4090"))


def test_the_run_it_writes_is_the_run_it_planned() -> None:
    found, run = plan_run("llama-3-8b", "2x8xA100-80GB@200Gbps", seq_len=2048)
    assert run is not None
    again = shardwise.estimate(run=run)
    assert again.time is not None
    assert again.time.step_s == pytest.approx(winner(found).step_s, rel=1e-9)
    assert again.known_memory.verdict == "fits"


@pytest.mark.parametrize(
    ("asked", "fits"),
    [
        ({"cluster": "8xH100-SXM", "seq_len": 8192, "strategy": "zero3"}, True),
        ({"cluster": "8xRTX-4090", "strategy": "zero2"}, False),
    ],
)
def test_a_plan_and_an_estimate_judge_a_configuration_alike(
    asked: dict[str, Any], fits: bool
) -> None:
    run = describe_run(model="llama-3-8b", **asked)
    found, _ = plan_run(run=run)
    device = found.problem.cluster.device
    judged = [
        *((one.strategy, one.verdict) for one in reasons(found, DoesNotFit)),
        *((one.strategy, one.verdict) for one in found.baselines),
        *((one.strategy, one.verdict(device)) for one in found.rejected),
    ]
    assert (found.winner is not None) == fits
    assert "at risk" in {verdict for _, verdict in judged}
    for strategy, verdict in judged:
        assert estimate_run(run._replace(strategy=strategy)).known_memory.verdict == verdict
    assert found.at_risk == (not fits)


def test_a_current_configuration_is_compared_with() -> None:
    _, run = plan_run("llama-3-8b", "8xH100-SXM")
    assert run is not None
    worse = run._replace(strategy=run.strategy.but(recompute="full", micro_batch=1, kind="zero3"))
    found, _ = plan_run(run=worse)
    names = {b.name: b for b in found.baselines}
    assert names["now"].candidate is not None
    assert names["now"].candidate.tokens_per_s < winner(found).tokens_per_s


def test_a_traced_mixture_says_what_stands_behind_its_figures() -> None:
    """gpt-oss-20b has 32 experts, as its card says; the catalogue keeps its trace."""
    found = plan("gpt-oss-20b", "8xH100-SXM")
    (warning,) = (one for one in found.warnings if isinstance(one, UnfittedExperts))
    assert warning.experts == 32


@pytest.mark.parametrize("stored", [True, False])
def test_a_warning_says_that_experts_stay_unquantised(stored: bool) -> None:
    adapter = {"rank": 16, "base": "nf4", "quantised_experts": stored}
    found = plan("qwen3-30b-a3b", "1xH100-SXM", adapter=adapter)
    kept = [one.kept_in for one in found.warnings if isinstance(one, UnquantizedExperts)]
    assert kept == ([] if stored else ["bf16"])


def test_what_cannot_be_planned_is_one_sentence() -> None:
    with pytest.raises(SpecError, match="2 nodes need a network.*2x8xH100-SXM@400Gbps"):
        plan("llama-3-8b", "2x8xH100-SXM")
    with pytest.raises(SpecError, match="step times of these CPUs are not known"):
        plan("llama-3-8b", "1x2xCPU")


def test_low_precision_reduction_is_only_used_when_allowed() -> None:
    asked = {"seq_len": 4096, **BATCH}
    exact = plan("llama-3-8b", "8x8xH100-SXM@50Gbps", **asked)
    assert winner(exact).strategy.reduce_dtype == "fp32"
    (tip,) = reasons(exact, LowPrecisionReduce)
    assert tip.gain > 0.01
    allowed = plan("llama-3-8b", "8x8xH100-SXM@50Gbps", low_precision_reduce=True, **asked)
    assert winner(allowed).tokens_per_s > winner(exact).tokens_per_s
    assert winner(allowed).strategy.reduce_dtype == "bf16"


def test_a_device_without_room_for_its_own_context_fits_nothing(tmp_path: Path) -> None:
    cluster = find_cluster("2xA100-80GB")
    tiny = cluster.but(device=cluster.device.but(memory=2**30, usable_memory=None))
    (tmp_path / "cluster.toml").write_text(write_cluster(tiny))
    found = plan("gpt2", str(tmp_path / "cluster.toml"))
    assert found.winner is None
    assert found.fitting == 0


# ---- the batch ------------------------------------------------------------------------------


def test_a_batch_that_does_not_divide_evenly_costs_nothing() -> None:
    """Audit A1: 512,000 tokens are 31.25 sequences on each of 16 devices."""
    asked: dict[str, Any] = {"model": "gpt2", "cluster": "2x8xH100-SXM@400Gbps", "seq_len": 1024}
    odd, even = (plan(**asked, global_batch=batch) for batch in (512_000, 2**19))
    assert winner(odd).strategy.micro_batch >= 16
    assert odd.mfu(winner(odd)) >= 0.97 * even.mfu(winner(even))
    (batch,) = reasons(odd, StepBatch)
    assert batch.asked == 512_000
    assert batch.tokens != batch.asked
    assert abs(batch.deviation) <= 0.05
    (exact,) = reasons(even, StepBatch)
    assert exact.tokens == exact.asked == 2**19


def test_an_exact_batch_is_exact_or_refused() -> None:
    asked: dict[str, Any] = {"seq_len": 1024, "batch_tolerance": 0.0}
    with pytest.raises(SpecError, match="507,904 or 524,288"):
        plan("gpt2", "2x8xH100-SXM@400Gbps", global_batch=512_000, **asked)
    found = plan("gpt2", "2x8xH100-SXM@400Gbps", global_batch=30 * 16 * 1024, **asked)
    assert found.problem.job.tokens_per_step(winner(found).strategy) == 30 * 16 * 1024


def test_a_nearby_batch_is_taken_where_the_closest_is_much_slower() -> None:
    """31 sequences per device: 31 at once do not fit, 1 x 31 wastes the device."""
    found = plan("llama-3-8b", "8xH100-SXM", seq_len=4096, global_batch=31 * 8 * 4096)
    (batch,) = reasons(found, StepBatch)
    sequences = batch.micro_batch * batch.accumulate
    assert abs(sequences / 31 - 1) <= 0.05
    assert batch.micro_batch > 1 or sequences == 31


def test_tokens_per_step_are_told_and_capped() -> None:
    """70B on 4,096 devices is 16.8 million tokens with one sequence on each."""
    found = plan("llama-3-70b", "512x8xH100-SXM@400Gbps")
    (batch,) = reasons(found, StepBatch)
    assert batch.tokens == 4096 * 4096
    (beyond,) = reasons(found, LargeBatch)
    assert beyond.limit_tokens == USUAL_BATCH
    # Without a batch to keep to, more devices only need a larger one.
    assert not reasons(found, DataParallelEnds)
    asked = plan("llama-3-70b", "512x8xH100-SXM@400Gbps", global_batch=4096 * 4096)
    (end,) = reasons(asked, DataParallelEnds)
    assert end.devices == 4096
    larger = plan("llama-3-70b", "512x8xH100-SXM@400Gbps", global_batch=4 * 4096 * 4096)
    (warned,) = reasons(larger, LargeBatch)
    assert warned.tokens == 4 * 4096 * 4096 > LARGE_BATCH
    assert not reasons(larger, DataParallelEnds)


def test_compressed_gradients_are_named_where_the_network_binds_and_never_chosen() -> None:
    named = {}
    for network in ("1Gbps", "400Gbps"):
        found = plan("gpt2", f"4x8xA100-80GB@{network}", global_batch=256 * 1024)
        assert winner(found).strategy.compress is None
        named[network] = reasons(found, CompressionGain)
    gains = {tip.strategy.compress: tip.gain for tip in named["1Gbps"]}
    # A fiftieth of the bytes against a half of them.
    assert gains["powersgd"] > gains["bf16"] > 0.01
    assert not named["400Gbps"]


def test_a_given_reduce_dtype_is_kept() -> None:
    _, run = plan_run("llama-3-8b", "8x8xH100-SXM@50Gbps", low_precision_reduce=True)
    assert run is not None
    low = run._replace(strategy=run.strategy.but(reduce_dtype="bf16"))
    again, kept = plan_run(run=low)
    assert kept is not None
    assert kept.strategy.reduce_dtype == "bf16"
    assert not reasons(again, LowPrecisionReduce)


def test_json_carries_reasons_as_data() -> None:
    found = plan("llama-3-8b", "8x8xH100-SXM@100Gbps", **BATCH)
    told = found.to_dict()
    kinds = [reason["kind"] for reason in told["why"]]
    assert "step batch" in kinds
    assert "limited by" in kinds
    compared = next(reason for reason in told["why"] if reason["kind"] == "compared")
    assert compared["strategy"]["kind"] in ("ddp", "zero1", "zero2", "zero3")
    (rival,) = (c for c in reasons(found, Compared)[:1])
    assert compared["throughput"] == rival.throughput
    assert told["winner"]["tokens_per_step"] == BATCH["global_batch"]
    assert all(Layout(r["kind"], Mesh(r["replicate"], r["shard"])) for r in told["rejected"])


@pytest.mark.parametrize(
    ("model", "expected"),
    [("mixtral-8x7b", ("pipeline",)), ("llama-3-70b", ("pipeline",))],
)
def test_parallelism_that_is_not_run_is_named_where_nothing_fits(
    model: str, expected: tuple[str, ...]
) -> None:
    found = plan(model, "8xA100-40GB")
    assert found.winner is None
    (other,) = reasons(found, OtherParallelism)
    assert other.parallelism == expected


def test_a_length_that_may_be_wrong_is_warned_of_first() -> None:
    found = plan("llama-3-8b", "8xH100-SXM", seq_len=16000, adapter="lora:16", for_stack="trl")
    beyond = BeyondPositions(seq_len=16000, positions=8192)
    assert found.warnings == [beyond, DecimalLength(seq_len=16000, binary=16 * 1024)]


def test_nothing_helps_is_not_said_beside_what_would_fit() -> None:
    words = ["--model", "llama-3-8b", "--cluster", "8xA100-80GB", "--optimizer", "muon"]
    for more in ([], ["--explain"]):
        printed = command("plan", *words, *more).stdout
        assert "--adapter lora:16" in printed
        assert NOTHING_FITS not in " ".join(printed.split())


# ---- screens --------------------------------------------------------------------------------

SCREENS = {
    "plan-gpt2-odd-batch": "--model gpt2 --cluster 2x8xH100-SXM@400Gbps --seq-len 1024 "
    "--global-batch 512K",
    "plan-8b": "--model llama-3-8b --cluster 8x8xH100-SXM@100Gbps --global-batch 4Mi",
    "plan-8b-explain": "--model llama-3-8b --cluster 8x8xH100-SXM@100Gbps --global-batch 4Mi "
    "--explain",
    "plan-8b-memory": "--model llama-3-8b --cluster 8xH100-SXM --objective memory",
    "plan-70b-4096": "--model llama-3-70b --cluster 512x8xH100-SXM@400Gbps",
    "plan-405b": "--model llama-3.1-405b --cluster 2048x8xH100-SXM@400Gbps --seq-len 8192 "
    "--global-batch 16Mi",
    "plan-405b-withheld": "--model llama-3.1-405b --cluster 2048x8xH100-SXM@400Gbps "
    "--seq-len 8192 --global-batch 16Mi --for megatron-bridge",
    "plan-70b-nothing-fits": "--model llama-3-70b --cluster 8xH100-SXM",
    "plan-70b-explain-nothing-fits": "--model llama-3-70b --cluster 8xH100-SXM --explain",
    "plan-8b-consumer": "--model llama-3-8b --cluster 8xRTX-4090",
    "plan-moe-nothing-fits": "--model mixtral-8x7b --cluster 8xA100-40GB",
    "plan-lora-trl": "--model llama-3-8b --cluster 8xH100-SXM --adapter lora:16 --for trl "
    "--tokens 1B --price 2.5",
    "plan-money": "--model llama-3-8b --cluster 8x8xH100-SXM@100Gbps --objective money "
    "--tokens 1T --price 2.5",
}
# Without a recommendation.
EXIT_1 = {
    "plan-405b-withheld",
    "plan-70b-nothing-fits",
    "plan-70b-explain-nothing-fits",
    "plan-8b-consumer",
    "plan-moe-nothing-fits",
}
LONGEST = 30


@pytest.mark.parametrize("name", SCREENS)
def test_screen(name: str) -> None:
    done = command("plan", *SCREENS[name].split())
    printed = done.stdout
    lines = printed.splitlines()
    assert done.returncode == (name in EXIT_1)
    assert all(len(line) <= 80 for line in lines)
    assert len(lines) <= LONGEST or "--explain" in SCREENS[name]
    assert_screen(name, printed)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"adapter": "qlora:16"},
        {"seq_len": 131072},
        {"cluster": "16x8xH100-SXM@100Gbps", "global_batch": "1Mi"},
    ],
)
def test_a_plan_and_an_estimate_agree_on_mfu(asked: dict[str, Any]) -> None:
    found, run = plan_run(**{"model": "llama-3.1-8b", "cluster": "8xH100-SXM", **asked})
    assert run is not None
    rates = estimate_run(run).throughput
    assert rates is not None
    assert found.mfu(winner(found)) == pytest.approx(rates.mfu, rel=1e-6)
