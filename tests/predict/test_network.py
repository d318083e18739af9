"""Laws of collectives: what must hold whatever the coefficients are."""

from __future__ import annotations

import numpy as np
import pytest

from shardwise.predict.configurations import Configurations
from shardwise.predict.intervals import error_interval
from shardwise.predict.kernels import coefficients_for
from shardwise.predict.network import all_reduce_s, ring_s
from shardwise.predict.rates import Bandwidths, Coefficients, Hardware
from shardwise.predict.time import times_of
from shardwise.spec.catalogue import find_device
from shardwise.spec.cluster import ClusterSpec, parse_cluster
from shardwise.spec.lookup import find_model
from shardwise.spec.strategy import Strategy
from shardwise.units.load import load_units

H100 = Hardware(
    peak_flops=1e15,
    memory_bandwidth=3e12,
    link_bandwidth=450e9,
    network_bandwidth=50e9,
    devices_per_node=8,
)
GROUPS = np.asarray([16, 32, 64, 128, 256, 512, 1024])


def _cluster(text: str) -> ClusterSpec:
    return parse_cluster(text, find_device)


@pytest.fixture(params=["A100-80GB", "H100-SXM"])
def k(request: pytest.FixtureRequest) -> Coefficients:
    found = coefficients_for(_cluster(f"2x8x{request.param}@400Gbps"))
    assert found is not None
    return found


@pytest.mark.parametrize("size", [1e6, 1e8, 1e10])
def test_bandwidth_falls_or_stays_with_nodes(k: Coefficients, size: float) -> None:
    message = np.full(len(GROUPS), size)
    gathered = message * (GROUPS - 1) / GROUPS / ring_s(message, GROUPS, H100, k)
    assert (np.diff(gathered) <= 1e-6 * gathered[:-1]).all()
    reduced = 1 / all_reduce_s(message, GROUPS, np.ones_like(GROUPS), H100, k)
    assert (np.diff(reduced) <= 1e-6 * reduced[:-1]).all()


def test_bandwidth_rises_with_the_message(k: Coefficients) -> None:
    messages = np.asarray([1e5, 1e6, 1e7, 1e8, 1e9])
    group = np.full(len(messages), 64)
    assert (np.diff(messages / ring_s(messages, group, H100, k)) > 0).all()


@pytest.mark.parametrize("size", [1e4, 1e6, 1e8, 1e10])
def test_an_all_reduce_is_never_slower_than_its_ring(k: Coefficients, size: float) -> None:
    message, alone = np.full(len(GROUPS), size), np.ones_like(GROUPS)
    # A ring all-reduce is a reduce-scatter and an all-gather.
    ring = 2 * ring_s(message, GROUPS, H100, k)
    assert (all_reduce_s(message, GROUPS, alone, H100, k) <= ring * (1 + 1e-12)).all()


def test_defaults_mean_no_effect_of_trees() -> None:
    plain = Coefficients(0.6, 1e-4, 0.4, 1.0, 6e-6, 0.5, 0.5, 0.0, 0.0, 0.1, 2.0)
    message, alone = np.full(len(GROUPS), 1e9), np.ones_like(GROUPS)
    ring = 2 * ring_s(message, GROUPS, H100, plain)
    assert all_reduce_s(message, GROUPS, alone, H100, plain) == pytest.approx(ring)


def test_measured_bandwidth_holds_where_there_is_one(k: Coefficients) -> None:
    table = Bandwidths(
        nodes=(1.0, 2.0, 8.0), ring=(2e11, 1e11, 2.5e10), all_reduce=(4e11, 2e11, 5e10)
    )
    measured = H100._replace(measured=table)
    group, message = np.asarray([8, 16, 32, 64]), np.full(4, 1e9)
    moved = message * (group - 1) / group
    # 4 nodes lie halfway between 2 and 8 on a logarithmic scale.
    assert ring_s(message, group, measured, k) == pytest.approx(moved / [2e11, 1e11, 5e10, 2.5e10])
    one = np.ones_like(group)
    expected = 2 * moved / [4e11, 2e11, 1e11, 5e10]
    assert all_reduce_s(message, group, one, measured, k) == pytest.approx(expected)


def test_the_interval_widens_with_the_distance_from_what_was_measured() -> None:
    near = error_interval(_cluster("2x8xH100-SXM@400Gbps"))
    assert error_interval(_cluster("4x8xH100-SXM@400Gbps")) == near
    far = error_interval(_cluster("64x8xH100-SXM@400Gbps"))
    farther = error_interval(_cluster("256x8xH100-SXM@400Gbps"))
    known = error_interval(_cluster("2x8xH100-SXM@400Gbps").but(software="prime-rl"), "RL")
    new = error_interval(_cluster("2x8xH100-SXM@400Gbps"), "RL")
    kernels = error_interval(_cluster("2x8xB200@400Gbps"))
    relative = error_interval(_cluster("2x8xMI250X@400Gbps"))
    experts = error_interval(_cluster("2x8xH100-SXM@400Gbps"), "experts")
    wider = ((known, new), (near, far), (far, farther), (near, kernels), (kernels, relative))
    for narrow, wide in (*wider, (near, experts)):
        assert wide[1] - wide[0] > narrow[1] - narrow[0]
    assert -1 < farther[0] < 0 < farther[1]


def test_compiled_blocks_are_faster_and_save_less(k: Coefficients) -> None:
    assert 0 < k.fused < 1
    strategy = Strategy.read({"kind": "zero3", "micro_batch": 2}).resolve(16, 8)
    model, columns = find_model("llama-3-8b"), Configurations.of([strategy])
    eager = load_units(model, 4096, strategy)
    compiled = load_units(model, 4096, strategy.but(compile=True))
    before = times_of(eager, columns, H100, k).step_s
    assert (times_of(compiled, columns, H100, k).step_s < before).all()
    # Without a fitted effect there is none.
    unknown = k._replace(fused=0.0)
    assert times_of(compiled, columns, H100, unknown).step_s == pytest.approx(before)
    kept = [units.blocks[0].stage.kept["none"].activation_bytes for units in (eager, compiled)]
    assert kept[1] < kept[0]
