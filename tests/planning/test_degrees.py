"""Degrees of tensor and context parallelism: which are tried, chosen and explained."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from shardwise.planning.api import plan
from shardwise.planning.degrees import degrees, of_groups
from shardwise.planning.layout import Degrees
from shardwise.planning.make import make_plan
from shardwise.planning.plan import Plan
from shardwise.planning.price import price_one
from shardwise.planning.problem import Problem, Units
from shardwise.planning.reasons.layout import Divided
from shardwise.planning.reasons.limits import Alternative
from shardwise.planning.reasons.reason import Reason
from shardwise.planning.reasons.settings import StepBatch
from shardwise.planning.reasons.warnings import FewerDevices, NoPeerToPeer
from shardwise.planning.rows import Candidate
from shardwise.planning.space import Space
from shardwise.predict.rates import comparison_error
from shardwise.spec.catalogue import figure
from shardwise.spec.job import Job
from shardwise.spec.lookup import find_cluster, find_model
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.units.division import Division, problems_of_division


def chosen(found: Plan) -> Candidate:
    assert found.winner is not None
    return found.winner


def only(found: Plan, kind: type[Reason]) -> Reason:
    (reason,) = (one for one in found.why if isinstance(one, kind))
    return reason


def asked(model: str, cluster: str, seq_len: int = 8192) -> Problem:
    job = Job(seq_len=seq_len)
    return Problem(find_model(model), find_cluster(cluster), job, Strategy(kind="zero3"))


def test_tensor_groups_stay_in_a_node_and_divide_the_model() -> None:
    found = degrees(asked("llama-3-8b", "4x8xH100-SXM@400Gbps"), Space())
    assert found[0] == Degrees()
    # 8 key-value heads, 8 devices in a node.
    assert {pair.tensor for pair in found} == {1, 2, 4, 8}
    assert all(32 % pair.inner == 0 for pair in found)
    # 2 key-value heads.
    few = degrees(asked("qwen2.5-0.5b", "8xH100-SXM"), Space())
    assert {pair.tensor for pair in few} == {1, 2}


def test_a_ring_is_taken_where_there_are_too_few_heads() -> None:
    found = degrees(asked("llama-3.1-70b", "512x8xH100-SXM@400Gbps", 2**17), Space())
    for pair in found:
        assert pair.ring == ((64 // pair.tensor) % pair.context > 0)


@pytest.mark.parametrize(
    ("model", "expert", "divided"),
    [("mixtral-8x7b", 8, True), ("mixtral-8x7b", 16, False), ("llama-3-8b", 2, False)],
)
def test_experts_are_divided_evenly(model: str, expert: int, divided: bool) -> None:
    spec = find_model(model)
    assert isinstance(spec, ModelSpec)
    assert (problems_of_division(spec, Division(expert=expert), 4096) == []) == divided


@pytest.mark.parametrize("model", ["gpt2", "mixtral-8x7b"])
def test_what_cannot_be_divided_is_not(model: str) -> None:
    found = degrees(asked(model, "8xH100-SXM", 1024), Space())
    assert {pair.tensor for pair in found} == {1}


def test_groups_take_the_place_of_devices() -> None:
    cluster = find_cluster("4x8xH100-SXM@400Gbps")
    assert of_groups(cluster, 4).devices_per_node == 2
    across = of_groups(cluster, 16)
    assert (across.nodes, across.devices_per_node) == (2, 1)


def test_pure_data_parallelism_wins_unless_it_is_much_slower() -> None:
    found = plan("llama-3.1-70b", "64x8xH100-SXM@400Gbps", seq_len=8192, global_batch="4Mi")
    best = chosen(found)
    assert not best.layout.is_divided
    divided = [c for c in found.layouts if c.layout.is_divided]
    assert divided
    assert all(
        best.tokens_per_s >= (1 - comparison_error()) * c.tokens_per_s * (1 - 1e-9) for c in divided
    )


def test_a_batch_of_fewer_sequences_than_devices_needs_groups() -> None:
    found = plan("llama-3.1-70b", "512x8xH100-SXM@400Gbps", seq_len=8192, global_batch="4Mi")
    best = chosen(found)
    # 512 sequences on 4,096 devices.
    assert best.strategy.data_parallel <= 512
    assert found.problem.job.tokens_per_step(best.strategy) == 2**22
    reason = only(found, Divided)
    assert isinstance(reason, Divided)
    assert reason.sequences == pytest.approx(512 / 4096)
    told = reason.words()
    assert "0.12 sequences per device" in told
    assert "inside the node" in told
    batch = only(found, StepBatch)
    assert f"groups of {best.strategy.mesh.inner} devices" in batch.words()


def test_the_cost_that_is_told_is_that_of_the_collectives() -> None:
    # On a network that is not what the step waits for.
    found = plan("llama-3.1-70b", "512x8xH100-SXM@3200Gbps", seq_len=8192, global_batch="4Mi")
    reason = only(found, Divided)
    assert isinstance(reason, Divided)
    # Without collectives inside blocks, which compute waits for, a step is shorter by their share.
    best = chosen(found)
    units = Units(found.problem)
    quick = found.problem.cluster.device.but(link_bandwidth="1e18B/s")
    there = found.problem.cluster.but(device=quick)
    faster = price_one(found.problem, units, best.strategy, there)
    assert "tensor" in reason.shares
    gained = 1 - faster.step_s / best.step_s
    assert 0.5 * reason.shares["tensor"] < gained < 1.1 * reason.shares["tensor"]


def test_long_sequences_are_divided() -> None:
    found = plan("llama-3.1-8b", "8xH100-SXM", seq_len=2**17)
    best = chosen(found)
    assert best.strategy.context > 1 or best.strategy.tensor > 1


def test_a_batch_of_less_than_a_sequence_is_refused() -> None:
    with pytest.raises(SpecError, match="fewer than one sequence"):
        plan("llama-3-8b", "8xH100-SXM", seq_len=8192, global_batch=4096)


@pytest.mark.parametrize(
    ("model", "cluster", "seq_len", "batch"),
    [
        ("llama-3.1-8b", "2x4xH100-SXM@100Gbps", 4096, 4 * 4096),
        ("llama-3.1-8b", "8xA100-80GB", 2**16, None),
    ],
)
def test_it_finds_what_pricing_every_degree_finds(
    model: str, cluster: str, seq_len: int, batch: int | None
) -> None:
    """Each pair of degrees searched alone: none of them is faster than what was found."""
    small = Space(
        recompute=("none", "selective", 0.5, "full"), prefetch=(1,), forward_prefetch=(0,),
        blocks_per_unit=(1,),
    )  # fmt: skip
    from shardwise.planning.search import Search

    job = Job(seq_len=seq_len, global_batch=batch)
    problem = Problem(find_model(model), find_cluster(cluster), job, Strategy(kind="zero3"))
    found = Search(problem, small).run().best()
    assert found is not None
    fastest = 0.0
    for tensor, context in product((1, 2, 4, 8), (1, 2, 4, 8)):
        alone = small._replace(tensor=(tensor,), context=(context,))
        try:
            best = Search(problem, alone).run().fastest()
        except SpecError:
            continue
        fastest = max(fastest, best.tokens_per_s if best else 0.0)
    assert found.tokens_per_s >= (1 - comparison_error() - 0.02) * fastest


def test_the_search_prices_few_configurations() -> None:
    """A guard against degrees that multiply the work: counted, not timed."""
    found = plan("llama-3.1-405b", "2048x8xH100-SXM@400Gbps", seq_len=8192, global_batch="16Mi")
    assert found.considered < 5_000


def test_a_batch_that_needs_division_and_does_not_fit_is_no_error() -> None:
    """Adapters, which are not divided, are then no way out."""
    found = plan("qwen3-8b", "8xA100-40GB", seq_len=2**20, global_batch=2**20)
    assert found.winner is None


def test_a_batch_that_only_groups_of_devices_divide_is_kept() -> None:
    """576 sequences on 384 devices are 1.5 on each and 3 on each pair."""
    asked_for: dict[str, Any] = {"seq_len": 8192, "global_batch": 576 * 8192}
    found = plan("llama-3.1-8b", "48x8xH100-SXM@400Gbps", **asked_for)
    batch = only(found, StepBatch)
    assert isinstance(batch, StepBatch)
    assert batch.tokens == batch.asked
    assert chosen(found).strategy.mesh.inner == 2


@pytest.mark.parametrize("tolerance", [None, 0.0])
def test_a_batch_that_nothing_divides_is_kept_on_fewer_devices(tolerance: float | None) -> None:
    """GPT-2 is not divided: 576 sequences fill 288 of 384 devices, two on each."""
    found = plan(
        "gpt2", "48x8xH100-SXM@400Gbps", seq_len=1024, global_batch=576 * 1024,
        batch_tolerance=tolerance,
    )  # fmt: skip
    (fewer,) = (one for one in found.warnings if isinstance(one, FewerDevices))
    assert (fewer.devices, fewer.of_devices) == (288, 384)
    assert fewer.neighbours == (384 * 1024, 768 * 1024)
    assert found.problem.cluster.devices == 288
    assert found.problem.job.tokens_per_step(chosen(found).strategy) == 576 * 1024


def test_cards_without_peer_to_peer_are_not_divided_unless_asked_for() -> None:
    found = plan("llama-3-8b", "8xRTX-4090")
    assert found.winner is None
    (warning,) = (one for one in found.warnings if isinstance(one, NoPeerToPeer))
    assert (warning.link_rate, warning.divided) == (32e9, False)
    assert warning.host_rate == figure("through_host") * 32e9
    offered = [one for one in found.tips if isinstance(one, Alternative)]
    assert {one.change for one in offered} == {"optimizer", "adapter", "states", "offload"}
    assert all(one.needed_bytes <= found.limit_bytes for one in offered)
    # Full training comes before adapters; among each, the fastest first.
    order = [(one.change == "adapter", -(one.tokens_per_s or 0)) for one in offered]
    assert order == sorted(order)
    problem = asked("llama-3-8b", "8xRTX-4090", 4096)
    assert {pair.tensor for pair in degrees(problem, Space())} == {1}
    assert {pair.tensor for pair in degrees(problem, Space(tensor=(4,)))} == {1, 4}


def test_a_warning_does_not_contradict_tensor_parallelism_that_was_asked_for() -> None:
    for model, tensor in (("qwen3-4b", 1), ("llama-3-8b", 4)):
        problem = asked(model, "8xRTX-4090", 4096)
        found = make_plan(problem, space=Space(tensor=(4,), context=(1,)))
        (warning,) = (one for one in found.warnings if isinstance(one, NoPeerToPeer))
        assert chosen(found).strategy.mesh.tensor == tensor
        assert warning.divided == (tensor > 1)
    one_each = make_plan(asked("gpt2", "2x1xRTX-4090@100Gbps", 1024))
    assert not any(isinstance(one, NoPeerToPeer) for one in one_each.warnings)
