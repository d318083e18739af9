"""All-to-alls that `shardwise calibrate` measured, in the predicted steps of expert parallelism."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.observe.observation import Observation, units_of
from shardwise.predict.configurations import Configurations
from shardwise.predict.kernels import coefficients_for
from shardwise.predict.traffic import predict_traffic
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.model import ModelSpec
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.trials.calibrate.machine.cluster import to_cluster
from shardwise.trials.calibrate.machine.collectives import Collective, GroupPlace, Operation
from shardwise.trials.calibrate.machine.compute import DTYPES, Compute, Product
from shardwise.trials.calibrate.machine.line import Line
from shardwise.trials.calibrate.machine.measure import Machine
from shardwise.trials.calibrate.machine.timing import Timing

SHAPE = {"layers": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "ffn": 64, "vocab": 1024,
         "max_positions": 128}  # fmt: skip
DENSE = ModelSpec.read({**SHAPE, "family": "llama"})
MIXTURE = ModelSpec.read({**SHAPE, "family": "qwen3_moe", "experts": 16, "experts_per_token": 4})
# Bytes per second: of the link inside a node, and of each of the two devices in it to the other.
INSIDE, BETWEEN = 4e8, 1e7
LATENCY_S = 1e-3
FLOPS_PER_S = 4e10
EXPERTS_INSIDE = {"kind": "zero3", "expert": 2}
EXPERTS_ACROSS = {"kind": "zero3", "expert": 4}
# Exchanges heads of dense models.
ULYSSES_INSIDE = {"kind": "zero3", "context": 2}


def measured(operation: Operation, place: GroupPlace, rate: float, latency_s: float) -> Collective:
    line = Line(latency_s, rate, (rate, rate), 1.0)
    return Collective(operation, place, 4 if place == "all" else 2, [], line)


def calibrated(**all_to_alls: Any) -> ClusterSpec:
    """Two nodes of two devices; `inside` and `between` are rate and latency of all-to-alls."""
    places: dict[str, GroupPlace] = {"inside": "inside a node", "between": "between nodes"}
    products = [
        Product(dtype, edge, Timing((2 * edge**3 / FLOPS_PER_S,)))
        for dtype in DTYPES
        for edge in (256, 512, 1024)
    ]
    collectives = [
        measured("all_gather", "inside a node", INSIDE, LATENCY_S),
        measured("all_gather", "between nodes", BETWEEN, LATENCY_S),
        measured("all_gather", "all", 2 * BETWEEN, 2 * LATENCY_S),
        *(measured("all_to_all", places[name], *line) for name, line in all_to_alls.items()),
    ]
    compute = Compute(products, FLOPS_PER_S, 5e9, 2e9, 1e-5, 5e9)
    return to_cluster(Machine("CPU", "gloo", 8 << 30, 2, 2, compute, collectives, 0.2))


def step_s(strategy: dict[str, Any], cluster: ClusterSpec) -> float:
    k = coefficients_for(cluster)
    assert k is not None
    return observation(strategy, cluster).predict(k, cluster).step_s


def observation(strategy: dict[str, Any], cluster: ClusterSpec) -> Observation:
    run = RunSpec(
        model=DENSE if "context" in strategy else MIXTURE,
        cluster=cluster,
        job=Job(seq_len=128),
        strategy=Strategy.read({**strategy, "micro_batch": 6, "param_dtype": "fp32"}),
    ).resolved()
    return Observation(run, units_of(run), 1.0, None, None)


def all_to_alls(strategy: dict[str, Any]) -> tuple[int, int]:
    """Calls and bytes of the all-to-alls in a step."""
    one = observation(strategy, calibrated())
    found = predict_traffic(one.units, Configurations.of([one.run.strategy]))
    [sent] = [each for each in found if each.op == "all_to_all"]
    return int(sent.calls[0]), int(sent.bytes[0])


def test_steps_change_by_the_difference_of_rates_times_bytes() -> None:
    """Half of an all-to-all leaves the device in a group of two, and the node in one of four."""
    slower = calibrated(inside=(INSIDE / 4, LATENCY_S), between=(BETWEEN / 2, LATENCY_S))
    for strategy, lost_s in (
        (EXPERTS_INSIDE, 4 / INSIDE - 1 / INSIDE),
        (ULYSSES_INSIDE, 4 / INSIDE - 1 / INSIDE),
        (EXPERTS_ACROSS, 2 / BETWEEN - 1 / BETWEEN),
    ):
        _, moved = all_to_alls(strategy)
        found = step_s(strategy, slower) - step_s(strategy, calibrated())
        assert found == pytest.approx(moved / 2 * lost_s, rel=1e-6), strategy


def test_steps_change_by_the_difference_of_latencies_times_calls() -> None:
    """A group of four waits for a hop inside a node and one between nodes."""
    slower = calibrated(inside=(INSIDE, 3 * LATENCY_S), between=(BETWEEN, 5 * LATENCY_S))
    cases = ((EXPERTS_INSIDE, 2), (ULYSSES_INSIDE, 2), (EXPERTS_ACROSS, 2 + 4))
    for strategy, more in cases:
        calls, _ = all_to_alls(strategy)
        found = step_s(strategy, slower) - step_s(strategy, calibrated())
        assert found == pytest.approx(calls * more * LATENCY_S, rel=1e-6), strategy


def test_steps_without_all_to_alls_do_not_change() -> None:
    slower = calibrated(inside=(INSIDE / 4, LATENCY_S), between=(BETWEEN / 2, 2 * LATENCY_S))
    for strategy in ({"kind": "ddp"}, {"kind": "zero3"}, {"kind": "zero3", "shard": 2}):
        assert step_s(strategy, slower) == step_s(strategy, calibrated())


def test_all_to_alls_as_fast_as_all_gathers_change_nothing() -> None:
    same = calibrated(inside=(INSIDE, LATENCY_S), between=(BETWEEN, LATENCY_S))
    for strategy in (EXPERTS_INSIDE, EXPERTS_ACROSS):
        assert step_s(strategy, same) == step_s(strategy, calibrated())
