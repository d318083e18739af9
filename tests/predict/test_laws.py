"""Exact laws of cost and simulation: closed forms that a race of streams must reproduce.

Derived for equal blocks from what waits for what, with pieces named as in tests/predict/blocks.py.
With one communicator, one unit gathered ahead and no contention:

- Forward: the root and the first block are waited for; from then on each block's gather runs
  beside the compute of the block before.
- Backward: when block i starts, the queue holds the reduce-scatter of block i+1; behind it comes
  the gather of block i-1. Whatever is slower, compute or this pair, sets the pace.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwise.predict import closed_form
from shardwise.predict.configurations import Configurations
from shardwise.predict.kernels import coefficients_for, hardware_of
from shardwise.predict.memory import predict_memory
from shardwise.predict.program.fsdp import Fsdp
from shardwise.predict.program.prices import Prices
from shardwise.predict.program.sizes import Sizes
from shardwise.predict.program.step import emit_step
from shardwise.predict.rates import Coefficients, Hardware
from shardwise.predict.time import Times, predict_time, schedule, times_of
from shardwise.predict.traffic import predict_traffic
from shardwise.predict.work import predict_work
from shardwise.spec.catalogue import find_device
from shardwise.spec.lookup import find_cluster
from shardwise.spec.model import ModelSpec
from shardwise.units.decoder import decoder_units
from shardwise.units.unit import ModelUnits
from tests.examples import examples
from tests.predict.blocks import Seconds, rules, simulate, uniform
from tests.predict.toy import resolve

# ---- closed forms of equal blocks --------------------------------------------------------------


class Pieces(NamedTuple):
    """Seconds of the pieces of a model of equal blocks."""

    forward: float
    backward: float
    gather: float
    gather_again: float
    scatter: float
    copy_out: float
    copy_in: float
    root_forward: float
    root_backward: float
    root_gather: float
    root_scatter: float
    root_copy_out: float
    root_copy_in: float

    @classmethod
    def of(cls, d: Seconds) -> Pieces:
        columns = {name: d[name][0] for name in cls._fields}
        assert all(np.all(column == np.ravel(column)[0]) for column in columns.values())
        return cls(**{name: float(np.ravel(column)[0]) for name, column in columns.items()})


def forward_s(n: int, p: Pieces) -> float:
    waited = p.root_gather + p.gather
    copied = p.root_copy_out + n * p.copy_out
    return waited + copied + (n - 1) * max(p.forward, p.gather) + p.forward + p.root_forward


def serial_backward_s(n: int, p: Pieces) -> float:
    """Gathers and reduce-scatters take turns on one communicator."""
    computed = p.copy_out + p.backward
    paced = max(
        max(computed, p.scatter) + p.copy_in,
        max(p.copy_out, p.scatter) + p.gather_again,
    )
    first = max(computed + p.copy_in, p.copy_out + p.gather_again)
    last = max(computed, p.scatter) + p.copy_in
    middle = first + (n - 2) * paced + last if n > 1 else computed + p.copy_in
    return max(p.gather_again, p.root_backward) + middle + _tail(p)


def separate_backward_s(n: int, p: Pieces) -> float:
    """Gathers, compute and reduce-scatters each at their own pace: the slowest sets it."""
    computed = p.copy_out + p.backward + p.copy_in
    paced = max(p.copy_out + p.gather_again, computed, p.scatter + p.copy_in)
    return max(p.gather_again, p.root_backward) + computed + (n - 1) * paced + _tail(p)


def _tail(p: Pieces) -> float:
    """The first block's reduce-scatter, then the root's: nothing is left to hide them."""
    return p.scatter + p.root_copy_in + p.root_scatter


def exposed_without_prefetch_s(n: int, p: Pieces, contention: float) -> float:
    """What is waited for where every gather of the backward is issued when it is needed."""
    slowed = p.forward + contention * min(p.forward, p.gather)
    forward = p.root_gather + p.gather + (n - 1) * max(0.0, p.gather - slowed)
    return forward + n * (p.gather_again + p.scatter) + p.root_scatter


SECONDS = st.floats(0.001, 5.0)
PIECES = st.builds(Pieces, **dict.fromkeys(Pieces._fields, SECONDS))
BLOCKS = st.integers(1, 12)


@given(n=BLOCKS, p=PIECES, contention=st.floats(0, 0.5), k=st.integers(1, 5))
def test_without_prefetch_the_exposed_communication_is_a_sum(
    n: int, p: Pieces, contention: float, k: int
) -> None:
    """Each micro-batch waits for the root's and the first block's gather, for what the forward of
    a block does not hide of the next one's, and for everything that the backward moves."""
    times = simulate(
        uniform(n, **p._asdict()), rules(prefetch=0, contention=contention, accumulate=k)
    )
    assert times.exposed_communication_s[0] == pytest.approx(
        k * exposed_without_prefetch_s(n, p, contention), rel=1e-12, abs=1e-12 * times.step_s[0]
    )


@given(n=BLOCKS, p=PIECES)
def test_on_one_communicator_the_backward_is_a_sum(n: int, p: Pieces) -> None:
    """A block takes its compute, or a gather after a reduce-scatter."""
    times = simulate(uniform(n, **p._asdict()), rules())
    assert times.step_s[0] == pytest.approx(forward_s(n, p) + serial_backward_s(n, p), rel=1e-12)


@given(n=BLOCKS, p=PIECES)
def test_with_a_group_for_reductions_the_backward_is_a_maximum(n: int, p: Pieces) -> None:
    """A block takes its compute, or its gather, or its reduce-scatter, whichever is slowest."""
    times = simulate(uniform(n, **p._asdict()), rules(separate=True))
    assert times.step_s[0] == pytest.approx(forward_s(n, p) + separate_backward_s(n, p), rel=1e-12)


@given(n=st.integers(2, 60), g=SECONDS, s=SECONDS)
def test_bound_by_bandwidth_the_sum_becomes_the_maximum(n: int, g: float, s: float) -> None:
    """Where nothing computes: n(g+s) on one communicator, g + (n-1)·max(g, s) + s on two."""
    d = uniform(n, gather_again=g, scatter=s)
    assert simulate(d, rules()).step_s[0] == pytest.approx(n * (g + s), rel=1e-12)
    two = simulate(d, rules(separate=True)).step_s[0]
    assert two == pytest.approx(g + (n - 1) * max(g, s) + s, rel=1e-12)


# ---- real models on ideal hardware ---------------------------------------------------------

A100 = find_device("A100-80GB")
_fitted = coefficients_for(find_cluster("8xA100-80GB"))
assert _fitted is not None
FITTED = _fitted
# Physics without friction: no latency, launch, contention, nor any limit on small matmuls.
IDEAL = Coefficients(
    matmul_efficiency=0.75,
    matmul_half_s=0.0,
    attention_efficiency=0.75,
    elementwise_factor=1.0,
    launch_s=0.0,
    link_efficiency=1.0,
    network_efficiency=1.0,
    hop_latency_s=0.0,
    network_latency_s=0.0,
    contention=0.0,
    optimizer_factor=1.0,
)
PEAK = 312e12


def network(bandwidth: float, peak: float = PEAK, per_node: int = 1) -> Hardware:
    """Nothing takes time but FLOPs and what is sent between nodes."""
    return Hardware(
        peak_flops=peak,
        memory_bandwidth=np.inf,
        link_bandwidth=np.inf,
        network_bandwidth=bandwidth,
        devices_per_node=per_node,
    )


def decoder(layers: int, hidden: int, vocab: int, seq_len: int, family: str = "mpt") -> ModelUnits:
    fields: dict[str, Any] = {
        "family": family,
        "layers": layers,
        "hidden": hidden,
        "heads": max(1, hidden // 128),
        "ffn": 4 * hidden,
        "vocab": vocab,
        "max_positions": seq_len,
    }
    return decoder_units(ModelSpec.read(fields), seq_len)


def zero3(devices: int, **changes: Any) -> Configurations:
    settings_ = {"reduce_dtype": "bf16", **changes}
    return Configurations.of([resolve("zero3", devices, **settings_)])


def gpt175b() -> ModelUnits:
    """A vocabulary that 512 devices divide, so that nothing is padded."""
    return decoder(layers=96, hidden=12288, vocab=98 * 512, seq_len=2048)


def seconds_of(
    units: ModelUnits, c: Configurations, hardware: Hardware, k: Coefficients
) -> Seconds:
    """The priced pieces of sharded rows."""
    p = Prices(Sizes(units, c, "adamw"), hardware, k)
    recomputed, root, found = p.s.recomputed, units.root, {}
    found["backward"] = np.stack(
        [p.backward(b, (recomputed > i).astype(int)) for i, b in enumerate(units.blocks)], axis=1
    )
    shards = c.reshard_forward[:, None]
    for name in ("forward", "gather", "gather_again", "scatter", "copy_out", "copy_in"):
        price = getattr(p, name)
        found[name] = np.stack([price(b) for b in units.blocks], axis=1)
        found[f"root_{name}"] = price(root)
    found["gather_again"] = np.where(shards, found["gather_again"], 0.0)
    found["reduce"] = np.zeros_like(found["forward"])
    nothing = np.zeros(len(c))
    found |= {"root_reduce": nothing, "head_reduce": nothing}
    return found | {"root_backward": p.root_backward(), "optimizer": p.optimizer()}


def timed(
    units: ModelUnits, c: Configurations, hardware: Hardware, k: Coefficients
) -> tuple[Seconds, Times]:
    return seconds_of(units, c, hardware, k), times_of(units, c, hardware, k)


def apart(units: ModelUnits, c: Configurations, hardware: Hardware, k: Coefficients) -> Times:
    """With a communicator of their own for reductions."""
    sizes = Sizes(units, c, "adamw")
    placed = Fsdp(sizes, scatter_stream="scatter")
    return schedule(tuple(emit_step(placed)), (len(c),), Prices(sizes, hardware, k))


@pytest.mark.parametrize("prefetch", [0, 1])
def test_equal_blocks_of_a_real_model_obey_the_closed_forms(prefetch: int) -> None:
    """175B on 64 nodes of 8, priced with fitted coefficients, copies and latencies included."""
    cluster = find_cluster("64x8xA100-80GB@200Gbps")
    hardware = hardware_of(cluster, "bf16")
    assert hardware is not None
    units, n = gpt175b(), 96
    c = zero3(512, micro_batch=2, recompute="full", prefetch=prefetch)
    if prefetch == 0:
        d, times = timed(units, c, hardware, FITTED)
        exposed = exposed_without_prefetch_s(n, Pieces.of(d), FITTED.contention)
        assert times.exposed_communication_s[0] == pytest.approx(
            exposed, rel=1e-12, abs=1e-12 * times.step_s[0]
        )
        return
    k = FITTED._replace(contention=0.0)
    d, times = timed(units, c, hardware, k)
    p = Pieces.of(d)
    optimizer = float(d["optimizer"][0])
    assert min(p) > 0
    assert times.step_s[0] == pytest.approx(
        forward_s(n, p) + serial_backward_s(n, p) + optimizer, rel=1e-12
    )
    assert apart(units, c, hardware, k).step_s[0] == pytest.approx(
        forward_s(n, p) + separate_backward_s(n, p) + optimizer, rel=1e-12
    )


@pytest.mark.parametrize("bandwidth", [1e9, 12.5e9, 25e9, 400e9])
def test_without_compute_twice_the_bandwidth_is_twice_the_throughput(bandwidth: float) -> None:
    """175B on 512 devices whose FLOPs are free: a step is its bytes over the bandwidth."""
    units, c = gpt175b(), zero3(512)
    one, two = (
        timed(units, c, network(rate, peak=1e40), IDEAL)[1].step_s[0]
        for rate in (bandwidth, 2 * bandwidth)
    )
    assert one / two == pytest.approx(2.0, rel=1e-9)
    sent = sum(int(collective.bytes[0]) for collective in predict_traffic(units, c))
    assert one == pytest.approx(sent * 511 / 512 / bandwidth, rel=1e-9)


@pytest.mark.parametrize("bandwidth", [1e9, 3e9, 6.25e9])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_with_hidden_compute_twice_the_bandwidth_halves_all_but_one_forward(
    bandwidth: float, recompute: str
) -> None:
    """175B on 512 A100s: step = V/S + f + F, where V is what is sent, and the last block's forward
    f and the head's F have nothing beside them. It holds while every block's compute takes less
    than its gather and its reduce-scatter, here up to 12.5 GB/s."""
    units, c = gpt175b(), zero3(512, micro_batch=2, recompute=recompute)
    steps = []
    for rate in (bandwidth, 2 * bandwidth):
        d, times = timed(units, c, network(rate), IDEAL)
        p = Pieces.of(d)
        assert max(p.forward, p.root_backward, p.backward) < min(p.gather_again, p.scatter)
        sent = sum(int(collective.bytes[0]) for collective in predict_traffic(units, c))
        alone = p.forward + p.root_forward
        assert times.step_s[0] == pytest.approx(sent * 511 / 512 / rate + alone, rel=1e-12)
        steps.append((float(times.step_s[0]), alone))
    (slow, alone), (fast, same) = steps
    assert alone == same
    assert (slow - alone) / (fast - alone) == pytest.approx(2.0, rel=1e-12)
    assert 1.99 < slow / fast < 2.0


@pytest.mark.parametrize(("bandwidth", "mfu"), [(25e9, 0.338), (12.5e9, 0.169)])
def test_the_simulator_meets_the_closed_form_of_175b(bandwidth: float, mfu: float) -> None:
    """On 512 A100s with the constants of the printed table: below its MFU, and within 2 %."""
    units, c = gpt175b(), zero3(512, micro_batch=2, recompute="full")
    d, times = timed(units, c, network(bandwidth), IDEAL)
    shape = closed_form.Shape(layers=96, hidden=12288, seq_len=2048)
    reached = closed_form.mfu(2 * 2048 / times.step_s[0], closed_form.forward_flops(shape), PEAK)
    assert 0.98 * mfu < reached < mfu
    p = Pieces.of(d)
    assert times.step_s[0] == pytest.approx(forward_s(96, p) + serial_backward_s(96, p), rel=1e-12)


# ---- ceilings ------------------------------------------------------------------------------


@st.composite
def sharded_run(draw: Any) -> tuple[ModelUnits, Configurations, Hardware, Coefficients]:
    """ZeRO-3 of some decoder on some cluster, on one communicator."""
    seq_len = draw(st.sampled_from([1, 128, 2048, 4096, 65536]))
    units = decoder(
        layers=draw(st.one_of(st.integers(1, 10), st.sampled_from([48, 200]))),
        hidden=draw(st.integers(1, 100)) * 128,
        vocab=draw(st.one_of(st.just(2), st.integers(2, 100_000))),
        seq_len=seq_len,
        family=draw(st.sampled_from(["mpt", "llama", "gpt2"])),
    )
    per_node = draw(st.sampled_from([1, 2, 4, 8]))
    devices = per_node * draw(st.integers(1, 64))
    assume(devices > 1)
    c = zero3(
        devices,
        micro_batch=draw(st.integers(1, 16)),
        recompute=draw(st.sampled_from(["none", "selective", "full", 0.5])),
        prefetch=draw(st.integers(0, 3)),
        reduce_dtype=draw(st.sampled_from(["bf16", "fp32"])),
    )
    hardware = Hardware(
        peak_flops=PEAK,
        memory_bandwidth=draw(st.sampled_from([2e12, np.inf])),
        link_bandwidth=draw(st.floats(1e9, 1e12)),
        network_bandwidth=draw(st.floats(1e8, 1e12)),
        devices_per_node=per_node,
    )
    return units, c, hardware, draw(st.sampled_from([IDEAL, FITTED]))


def ring_bandwidth(devices: int, hardware: Hardware) -> float:
    """Nominal bytes per second around the ring: all ports of a node send to the next together."""
    if devices <= hardware.devices_per_node:
        return float(hardware.link_bandwidth)
    between = hardware.network_bandwidth * hardware.devices_per_node
    return min(float(hardware.link_bandwidth), float(between))


@examples(150)
@given(sharded_run())
def test_no_simulation_exceeds_the_ceiling_of_its_tokens(
    run: tuple[ModelUnits, Configurations, Hardware, Coefficients],
) -> None:
    """MFU ≤ FLOPs of a forward over the time of one pass of the blocks at nominal bandwidth."""
    units, c, hardware, k = run
    _, times = timed(units, c, hardware, k)
    devices = int(c.shard[0])
    tokens = float(c.micro_batch[0]) * units.seq_len
    blocks = sum(block.numel for block in units.blocks)
    one_pass = closed_form.transfer_s(2.0 * blocks, devices, ring_bandwidth(devices, hardware))
    reached = closed_form.mfu(tokens / times.step_s[0], units.forward_flops(), PEAK)
    work = predict_work(units, c)
    assert reached == pytest.approx(
        work.model_flops[0] / devices / times.step_s[0] / PEAK, rel=1e-12
    )
    ceiling = closed_form.bandwidth_ceiling(tokens, units.forward_flops(), one_pass, PEAK)
    assert reached <= ceiling * (1 + 1e-12)


@examples(150)
@given(sharded_run())
def test_no_simulation_exceeds_its_kernels(
    run: tuple[ModelUnits, Configurations, Hardware, Coefficients],
) -> None:
    """MFU ≤ what matmuls and attention reach alone. A causal kernel does 7/4 of the 3 forwards
    that MFU counts for attention, so where all is attention that is 12/7 of its efficiency."""
    units, c, hardware, k = run
    _, times = timed(units, c, hardware, k)
    matmul = sum(unit.stage.matmul_flops for unit in units.units)
    attention = sum(unit.stage.attention_flops for unit in units.units)
    kernels = 3.0 * matmul / k.matmul_efficiency + 1.75 * attention / k.attention_efficiency
    tokens = float(c.micro_batch[0]) * units.seq_len
    reached = closed_form.mfu(tokens / times.step_s[0], units.forward_flops(), PEAK)
    assert reached <= 3.0 * (matmul + attention) / kernels * (1 + 1e-12)


@examples(150)
@given(sharded_run(), st.booleans())
def test_no_simulated_step_is_shorter_than_the_two_races(
    run: tuple[ModelUnits, Configurations, Hardware, Coefficients], separate: bool
) -> None:
    """A step takes max(compute, gathers) of its forward and max(compute, communication) of its
    backward, where a group for reductions makes a maximum of gathers and reduce-scatters."""
    d = {name: float(column[0].sum()) for name, column in seconds_of(*run).items()}
    gathers = d["gather"] + d["root_gather"]
    again, scatters = d["gather_again"], d["scatter"] + d["root_scatter"]
    moved = max(again, scatters) if separate else again + scatters
    races = max(d["forward"] + d["root_forward"], gathers) + max(
        d["backward"] + d["root_backward"], moved
    )
    times = apart(*run) if separate else times_of(*run)
    assert times.step_s[0] >= (races + d["optimizer"]) * (1 - 1e-12)


@examples(150)
@given(sharded_run(), st.sampled_from([1, 2, 5]))
def test_no_simulation_exceeds_the_ceiling_of_its_memory(
    run: tuple[ModelUnits, Configurations, Hardware, Coefficients], k: int
) -> None:
    """MFU ≤ that of as many tokens as fit, if nothing were kept of them but the inputs of blocks,
    into what the predicted peak leaves beside sharded state. Gradients are part of it from the
    second micro-batch on; in the first, they come as activations go."""
    units, c, hardware, coefficients = run
    c = replace(c, accumulate=np.asarray([k]))
    _, times = timed(units, c, hardware, coefficients)
    devices, blocks = int(c.shard[0]), sum(block.numel for block in units.blocks)
    least = closed_form.least_state_bytes(blocks, devices)
    state = least if k == 1 else closed_form.state_bytes(blocks, devices, 3)
    free = float(predict_memory(units, c).peak_bytes[0]) - state
    shape = closed_form.Shape(
        len(units.blocks), round(units.boundary_bytes / 2), units.seq_len, itemsize=2
    )
    tokens = float(c.micro_batch[0]) * units.seq_len
    assert tokens <= closed_form.most_tokens(free, shape)
    reached = closed_form.mfu(k * tokens / times.step_s[0], units.forward_flops(), PEAK)
    ceiling = closed_form.bandwidth_ceiling(
        closed_form.most_tokens(free, shape),
        units.forward_flops(),
        closed_form.transfer_s(2.0 * blocks, devices, ring_bandwidth(devices, hardware)),
        PEAK,
    )
    assert reached <= ceiling


# ---- sums ----------------------------------------------------------------------------------


@st.composite
def real_run(draw: Any) -> tuple[ModelUnits, Configurations]:
    """Rows of all kinds on 16 devices; they share the units."""
    rows = []
    for _ in range(4):
        kind = draw(st.sampled_from(["ddp", "zero1", "zero2", "zero3", "hsdp", "zero3:2"]))
        changes: dict[str, Any] = {
            "micro_batch": draw(st.integers(1, 4)),
            "accumulate": draw(st.integers(1, 6)),
            "recompute": draw(st.sampled_from(["none", "selective", "full", 0.25, 0.5])),
            "prefetch": draw(st.integers(0, 3)),
            "reduce_dtype": draw(st.sampled_from(["bf16", "fp32"])),
            "grad_sync": draw(st.sampled_from([None, "every", "local", "last"])),
        }
        if kind != "ddp":
            changes["reshard_after_backward"] = draw(st.sampled_from([None, True, False]))
        if kind == "zero3":
            changes["reshard_after_forward"] = draw(st.sampled_from([None, True, False, 4]))
        rows.append(resolve(kind, 16, 8, **changes))
    family = draw(st.sampled_from(["llama", "gpt2", "mpt"]))
    layers, width = draw(st.integers(1, 8)), draw(st.integers(1, 40))
    units = decoder(layers, 128 * width, draw(st.integers(2, 60_000)), 1024, family)
    return units, Configurations.of(rows)


@examples(60)
@given(real_run(), st.sampled_from(["A100-80GB", "H100-SXM"]), st.integers(1, 800))
def test_the_terms_sum_to_the_step(
    run: tuple[ModelUnits, Configurations], device: str, gigabits: int
) -> None:
    """Compute, copies, exposed communication and optimizer are the step; what is exposed is no
    less than nothing and no more than all that is moved; contention slows compute by its share
    at most."""
    units, c = run
    cluster = find_cluster(f"2x8x{device}@{gigabits}Gbps")
    times = predict_time(units, c, cluster, "bf16", "adamw")
    k, hardware = coefficients_for(cluster), hardware_of(cluster, "bf16")
    assert times is not None
    assert k is not None
    assert hardware is not None
    parts = times.compute_s + times.copy_s + times.exposed_communication_s + times.optimizer_s
    assert parts == pytest.approx(times.step_s, rel=1e-12)
    slack = 1e-12 * times.step_s
    assert (times.exposed_communication_s >= -slack).all()
    assert (times.exposed_communication_s <= times.communication_s + slack).all()
    d = seconds_of(units, c, hardware, k)
    alone = (d["forward"] + d["backward"]).sum(axis=1) + d["root_forward"] + d["root_backward"]
    alone = c.accumulate * alone
    assert (times.compute_s >= alone * (1 - 1e-12)).all()
    assert (times.compute_s <= alone * (1 + k.contention) * (1 + 1e-12)).all()


@examples(60)
@given(real_run())
def test_communication_takes_the_time_of_its_bytes(
    run: tuple[ModelUnits, Configurations],
) -> None:
    """Without latency, seconds are the bytes of the traffic around a ring: (n-1)/n of a gather or
    reduce-scatter and twice that of an all-reduce."""
    units, c = run
    hardware = network(25e9)._replace(link_bandwidth=25e9)
    _, times = timed(units, c, hardware, IDEAL)
    sizes = {"shard": c.shard, "reshard": c.reshard_group, "replicate": c.replicate}
    seconds = np.zeros(len(c))
    for collective in predict_traffic(units, c):
        n = np.maximum(sizes[collective.group], 1)
        passes = 2 if collective.op == "all_reduce" else 1
        seconds += passes * collective.bytes * (n - 1) / n / 25e9
    assert times.communication_s == pytest.approx(seconds, rel=1e-9)
