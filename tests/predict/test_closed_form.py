"""The closed form against its printed tables; constants and figures are typed in, not computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.predict.closed_form import (
    Machine,
    Optimum,
    Shape,
    ZeroStage,
    activation_bytes,
    bandwidth_ceiling,
    best,
    forward_flops,
    free_bytes,
    hfu,
    hiding_bandwidth,
    least_state_bytes,
    memory_ceiling,
    mfu,
    most_tokens,
    passes,
    state_bytes,
    step_s,
    transfer_s,
)

A100 = 312e12
MEMORY = 0.9 * 40e9
EFFICIENCY = 0.75
# 200 and 100 Gbps.
FAST, SLOW = 25e9, 12.5e9

MODELS = {
    "1.3B": Shape(24, 2048, 2048),
    "7B": Shape(32, 4096, 2048),
    "13B": Shape(40, 5120, 2048),
    "30B": Shape(48, 7168, 2048),
    "66B": Shape(64, 9216, 2048),
    "175B": Shape(96, 12288, 2048),
    "310B": Shape(96, 16384, 2048),
}


def machine(devices: int, bandwidth: float) -> Machine:
    return Machine(devices, MEMORY, bandwidth, A100, EFFICIENCY)


# Parameters in billions, seconds of a pass at 25 GB/s on endlessly many devices, and for 8, 64 and
# 512 devices free GB and the most tokens (whole ones); None is out of memory.
SIZES = [
    ("1.3B", "1.21", "0.10", [("33.3", 338562), ("35.4", 360066), ("35.7", 362754)]),
    ("7B", "6.44", "0.52", [("21.9", 83569), ("33.2", 126577), ("34.6", 131953)]),
    ("13B", "12.58", "1.01", [("8.9", 21842), ("31.0", 75602), ("33.7", 82322)]),
    ("30B", "29.60", "2.37", [None, ("24.9", 36187), ("31.4", 45595)]),
    ("66B", "65.23", "5.22", [None, ("13.6", 11509), ("27.8", 23605)]),
    ("175B", "173.95", "13.92", [None, None, ("19.7", 8346)]),
    ("310B", "309.24", "24.74", [None, None, ("7.0", 2228)]),
]


@pytest.mark.parametrize(("name", "billions", "seconds", "columns"), SIZES)
def test_sizes_are_those_of_the_table(
    name: str, billions: str, seconds: str, columns: list[tuple[str, int] | None]
) -> None:
    """Parameters, a pass over the network, free memory and the most tokens per device."""
    shape = MODELS[name]
    assert f"{shape.parameters / 1e9:.2f}" == billions
    assert f"{transfer_s(shape.parameters * 2, np.inf, FAST):.2f}" == seconds
    for devices, column in zip((8, 64, 512), columns, strict=True):
        free = free_bytes(shape, devices, MEMORY, 3)
        if column is None:
            assert free < 0
        else:
            assert f"{free / 1e9:.1f}" == column[0]
            assert int(most_tokens(free, shape)) == column[1]


CEILINGS = [
    ("1.3B", "33.9"),
    ("7B", "11.5"),
    ("13B", "7.0"),
    ("30B", "3.8"),
    ("66B", "1.96"),
    ("175B", "0.69"),
    ("310B", "0.18"),
]


@pytest.mark.parametrize(("name", "printed"), CEILINGS)
def test_ceilings_are_those_of_the_line(name: str, printed: str) -> None:
    """At 512 devices and 200 Gbps; at 100 Gbps exactly half."""
    shape = MODELS[name]
    free = free_bytes(shape, 512, MEMORY, 3)
    ceiling = memory_ceiling(shape, free, FAST, A100)
    assert f"{ceiling:.{len(printed.partition('.')[2])}f}" == printed
    assert memory_ceiling(shape, free, SLOW, A100) == ceiling / 2


# MFU, HFU, whole tokens per second and device, kept share, batch at 200 and at 100 Gbps; percentage
# points between the printed MFUs.
OPTIMA = [
    ("7B", 8, ".643/.750/4789/.50/4", ".592/.750/4411/.20/8", "5.1"),
    ("7B", 64, ".706/.741/5258/.85/4", ".610/.742/4545/.35/8", "9.6"),
    ("7B", 512, ".713/.736/5308/.90/4", ".616/.739/4589/.40/8", "9.7"),
    ("13B", 64, ".624/.739/2418/.45/4", ".576/.740/2232/.15/8", "4.8"),
    ("13B", 512, ".630/.735/2442/.50/4", ".582/.737/2253/.20/8", "4.8"),
    ("30B", 64, ".573/.736/961/.15/4", ".559/.736/937/.05/8", "1.4"),
    ("66B", 128, ".556/.733/427/.05/4", ".343/.457/263/.00/4", "21"),
    ("175B", 512, ".338/.451/98/.00/2", ".169/.225/49/.00/2", "17"),
]


def printed(optimum: Optimum | None) -> str:
    assert optimum is not None
    shares = [f"{value:.3f}"[1:] for value in (optimum.mfu, optimum.hfu)]
    kept = f"{optimum.kept:.2f}"[1:]
    return "/".join([*shares, str(int(optimum.tokens_per_s)), kept, str(optimum.batch)])


@pytest.mark.parametrize(("name", "devices", "fast", "slow", "points"), OPTIMA)
def test_optima_are_those_of_the_table(
    name: str, devices: int, fast: str, slow: str, points: str
) -> None:
    """The best batch and kept share at two bandwidths, to the printed digit."""
    found = [best(MODELS[name], machine(devices, rate)) for rate in (FAST, SLOW)]
    assert [printed(optimum) for optimum in found] == [fast, slow]
    assert all(optimum is not None and optimum.stage == 3 for optimum in found)
    high, low = (round(optimum.mfu, 3) for optimum in found if optimum is not None)
    difference = 100 * (high - low)
    assert f"{difference:.{len(points.partition('.')[2])}f}" == points


def test_nothing_fits_where_no_room_is_left_for_recomputing() -> None:
    """310B on 512 devices has memory for 2228 tokens, but not for a block's work on 2048."""
    shape = MODELS["310B"]
    assert best(shape, machine(512, FAST)) is None
    assert best(shape, machine(512, SLOW)) is None
    free = free_bytes(shape, 512, MEMORY, 3)
    assert most_tokens(free, shape) > 2048
    assert activation_bytes(shape, 2048, 0.0) > free


def test_half_the_bandwidth_halves_what_is_bound_by_it() -> None:
    """175B on 512 devices cannot batch its way out: MFU is linear in bandwidth."""
    fast, slow = (best(MODELS["175B"], machine(512, rate)) for rate in (FAST, SLOW))
    assert fast is not None
    assert slow is not None
    assert fast.mfu == pytest.approx(2 * slow.mfu, rel=1e-12)
    assert fast.bound_by == slow.bound_by == "bandwidth"


def test_half_the_bandwidth_costs_memory_first() -> None:
    """7B keeps its HFU with twice the batch, which leaves less to keep, so MFU falls."""
    fast, slow = (best(MODELS["7B"], machine(512, rate)) for rate in (FAST, SLOW))
    assert fast is not None
    assert slow is not None
    assert slow.hfu == pytest.approx(fast.hfu, abs=0.005)
    assert slow.batch == 2 * fast.batch
    assert slow.kept < fast.kept
    assert slow.mfu < fast.mfu - 0.05


@pytest.mark.parametrize(("tokens", "gigabytes"), [(4096, "57"), (16384, "14")])
def test_bandwidth_that_hides_a_forward(tokens: int, gigabytes: str) -> None:
    """On an A100, where attention is short beside the width."""
    shape = Shape(layers=32, hidden=4096, seq_len=0)
    assert f"{hiding_bandwidth(shape, tokens, machine(512, FAST)) / 1e9:.0f}" == gigabytes
    longer = shape._replace(seq_len=4096)
    ratio = hiding_bandwidth(shape, tokens, machine(8, 1.0)) / hiding_bandwidth(
        longer, tokens, machine(8, 1.0)
    )
    assert ratio == pytest.approx(1 + 1 / 6, rel=1e-12)


@pytest.mark.parametrize(
    ("stage", "whole", "shared"), [(0, 16, 0), (1, 4, 12), (2, 2, 14), (3, 0, 16)]
)
def test_sixteen_bytes_a_parameter(stage: ZeroStage, whole: int, shared: int) -> None:
    """Each stage of ZeRO moves bytes from every device to all of them together."""
    devices = np.asarray([1, 2, 8, 512])
    assert state_bytes(1000, devices, stage) == pytest.approx(1000 * (whole + shared / devices))
    assert least_state_bytes(1000, devices) == pytest.approx(1000 * 12 / devices)


def test_passes_of_each_stage() -> None:
    """ZeRO-3 makes three, in a row unless reductions have a group; ZeRO-2 and DDP make two."""
    assert [passes(stage) for stage in (0, 1, 2, 3)] == [(0, 2), (1, 1), (1, 1), (1, 2)]
    assert passes(3, separate=True) == (1, 1)
    assert step_s(1.0, 1.0, 5.0, passes(3)) == 15.0
    assert step_s(1.0, 1.0, 5.0, passes(3, separate=True)) == 10.0
    assert step_s(1.0, 0.0, 0.1, passes(3)) == 4.0


def test_latency_is_paid_by_message_and_hop() -> None:
    """A ring of N devices has N - 1 hops."""
    assert transfer_s(0.0, 8, 1e9, messages=32, hop_s=1e-6) == pytest.approx(32 * 7 * 1e-6)


@given(
    layers=st.integers(1, 128),
    hidden=st.integers(64, 20_000),
    seq_len=st.integers(1, 100_000),
    devices=st.integers(2, 4096),
    bandwidth=st.floats(1e8, 1e12),
    memory=st.floats(1e9, 2e11),
)
def test_the_best_never_exceeds_a_ceiling(
    layers: int, hidden: int, seq_len: int, devices: int, bandwidth: float, memory: float
) -> None:
    """Neither that of its kernels, nor of its tokens, nor of all the memory there is."""
    shape = Shape(layers, hidden, seq_len)
    found = best(shape, Machine(devices, memory, bandwidth, A100, EFFICIENCY), stages=(3,))
    if found is None:
        return
    flops = forward_flops(shape)
    assert flops == pytest.approx(24 * layers * hidden**2 * (1 + seq_len / (6 * hidden)), rel=1e-12)
    assert found.hfu <= EFFICIENCY * (1 + 1e-12)
    assert found.mfu == pytest.approx(3 / (4 - found.kept) * found.hfu, rel=1e-12)
    assert found.mfu == mfu(found.tokens_per_s, flops, A100)
    assert found.hfu == hfu(found.tokens_per_s, flops, A100, found.kept)
    one_pass = transfer_s(shape.parameters * 2, devices, bandwidth)
    reached = found.mfu * (1 - 1e-12)
    assert reached <= bandwidth_ceiling(found.batch * seq_len, flops, one_pass, A100)
    free = free_bytes(shape, devices, memory, 3)
    assert reached <= memory_ceiling(shape, free, bandwidth, A100, devices)
    assert found.spare_bytes >= 0
