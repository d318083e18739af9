"""Seconds of every piece of a step: what a device computes, copies and sends.

The forms are physics and the coefficients are fitted: a matmul's efficiency rises with its size,
element-wise work runs at memory bandwidth, nothing is faster than the launches it needs, and a
collective takes a latency per hop and its bytes over what the slowest link on its way gives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Configurations, Floats, Ints
from shardwise.predict.simulate import Durations, Rules
from shardwise.predict.traffic import BUCKET_BYTES, FIRST_BUCKET_BYTES, padded_rows
from shardwise.predict.work import recomputed_blocks, sum_by_unit
from shardwise.units.unit import ModelUnits, Policy, Stage


class Coefficients(NamedTuple):
    """Shares of what a data sheet promises, and the floors below which nothing gets."""

    # Of the dense peak: large matmuls; those of a pass that would take `matmul_half_s` at the
    # peak reach half of it.
    matmul_efficiency: float
    matmul_half_s: float
    attention_efficiency: float
    # Bytes really moved per byte that element-wise operations read and write.
    elementwise_factor: float
    launch_s: float
    # Of the link inside a node, and of the network between nodes.
    link_efficiency: float
    network_efficiency: float
    hop_latency_s: float
    network_latency_s: float
    contention: float
    # Passes over parameters, gradients and states in an optimizer step.
    optimizer_factor: float
    # Of a step, whatever it does.
    overhead_s: float = 0.0
    # Of the host around every collective of a unit, where hooks wait for it.
    hook_s: float = 0.0
    # How much more an all-reduce gets out of the link inside a node than an all-gather does.
    reduce_speedup: float = 1.0


class Hardware(NamedTuple):
    """What a cost needs to know of a cluster; rates in bytes or FLOP per second.

    Links may differ by row: then one pass prices the same configurations on several networks.
    """

    peak_flops: float
    memory_bandwidth: float
    link_bandwidth: float | Floats
    # Per device, one way; what the link gives where nothing is known.
    network_bandwidth: float | Floats
    devices_per_node: int
    # Groups of more nodes than this share slower links.
    pod_nodes: int = 2**30
    oversubscription: float = 1.0
    # Between a device and its host, and the host memory's share of a device: offload.
    host_link: float = 20e9
    host_memory: float = 15e9
    # Collectives of CPUs: hooks wait for them, and a reduce-scatter is run as an all-reduce.
    gloo: bool = False


def durations(
    units: ModelUnits, c: Configurations, hardware: Hardware, k: Coefficients, states: int = 2
) -> Durations:
    """Price every piece of every row; columns are units, of which the root is the last."""
    padded = padded_rows(units, c.shard).astype(np.float64)
    forward, backward = _compute(units, c, hardware, k)
    param, reduced = c.param_bytes[:, None], c.reduce_bytes[:, None]
    gathers = (c.sharded & (c.shard > 1))[:, None]
    reshards = gathers & c.reshard_forward[:, None]
    group = np.where(c.reshard_group > 0, c.reshard_group, c.shard)

    # Offloaded shards come from the host before each gather and go back after each scatter.
    offloaded = np.where(c.offload[:, None], padded / c.shard[:, None], 0.0)
    fetched, returned = (offloaded * size / hardware.host_link for size in (param, reduced))
    gather = np.where(gathers, _ring(padded * param, c.shard, hardware, k), 0.0) + fetched
    again = np.where(reshards, _ring(padded * param, group, hardware, k) + fetched, 0.0)
    # Gloo runs a reduce-scatter as an all-reduce.
    passes = 2.0 if hardware.gloo else 1.0
    scatter = np.where(gathers, passes * _ring(padded * reduced, c.shard, hardware, k), 0.0)
    scatter = scatter + returned
    messages = _in_buckets(units, padded * reduced, c)
    reduce = np.where(messages > 0, _all_reduce(messages, c, hardware, k), 0.0)

    # A CPU copies as it computes: at a share of its bandwidth.
    bandwidth = hardware.memory_bandwidth / (k.elementwise_factor if hardware.gloo else 1.0)
    hook = k.hook_s if hardware.gloo else 0.0
    # A scatter is followed by an all-reduce across replicas.
    hooks = hook * np.where(c.replicate > 1, 2.0, 1.0)[:, None]
    # Read and written once each.
    copy_out = np.where(gathers, 2.0 * padded * param / bandwidth + hook, 0.0)
    copy_in = np.where(gathers, padded * (param + reduced) / bandwidth + hooks, 0.0)
    state = padded.sum(axis=1) / c.shard * c.master_bytes * (2 + states)
    state_bandwidth = np.where(c.offload, hardware.host_memory, hardware.memory_bandwidth)
    return Durations(
        forward=forward[:, :-1],
        backward=backward[:, :-1],
        gather=gather[:, :-1],
        gather_again=again[:, :-1],
        scatter=scatter[:, :-1],
        reduce=reduce[:, 1:-1],
        copy_out=copy_out[:, :-1],
        copy_in=copy_in[:, :-1],
        root_forward=forward[:, -1],
        root_backward=backward[:, -1],
        root_gather=gather[:, -1],
        root_scatter=scatter[:, -1],
        root_reduce=reduce[:, -1],
        head_reduce=reduce[:, 0],
        root_copy_out=copy_out[:, -1],
        root_copy_in=copy_in[:, -1],
        optimizer=k.optimizer_factor * state / state_bandwidth + k.overhead_s,
    )


def rules(c: Configurations, k: Coefficients, gloo: bool = False) -> Rules:
    """What each row's schedule obeys; with Gloo, FSDP's hooks wait for their collectives."""
    rows = len(c)
    return Rules(
        prefetch=c.prefetch,
        forward_prefetch=c.forward_prefetch,
        separate=np.zeros(rows, dtype=np.bool_),
        waits=c.sharded & gloo,
        joins=~c.sharded,
        contention=np.full(rows, k.contention),
        accumulate=c.accumulate,
        gathers_every=c.reshard_backward,
        scatters_every=c.shard_sync_every,
        reduces_every=c.replicate_sync_every,
    )


# ---- compute --------------------------------------------------------------------------------


def _compute(
    units: ModelUnits, c: Configurations, h: Hardware, k: Coefficients
) -> tuple[Floats, Floats]:
    """Seconds of every unit's forward and backward; blocks run one by one, also within a unit."""
    tokens = c.micro_batch * float(units.seq_len)
    blocks = units.single_blocks
    kinds = {id(block): block.stage for block in blocks}

    def columns(price: Callable[[Stage], Floats]) -> Floats:
        priced = {key: price(stage) for key, stage in kinds.items()}
        return np.stack([priced[id(block)] for block in blocks], axis=1)

    def with_root(per_block: Floats, root: Floats) -> Floats:
        return np.concatenate([sum_by_unit(per_block, units), root[:, None]], axis=1)

    full = columns(lambda stage: _again(stage, "full", tokens, h, k))
    selective = columns(lambda stage: _again(stage, "selective", tokens, h, k))
    recomputed = recomputed_blocks(c, len(blocks))
    extra = np.where(recomputed, full, np.where(c.selective[:, None], selective, 0.0))
    forward = columns(lambda stage: _forward(stage, tokens, h, k))
    backward = columns(lambda stage: _backward(stage, tokens, h, k)) + extra
    root = units.root.stage
    return (
        with_root(forward, _forward(root, tokens, h, k)),
        with_root(backward, _backward(root, tokens, h, k)),
    )


def _seconds(
    matmul: Floats, attention: Floats, moved: Floats, kernels: float, h: Hardware, k: Coefficients
) -> Floats:
    efficiency = k.matmul_efficiency * matmul / (matmul + k.matmul_half_s * h.peak_flops)
    product = np.where(matmul > 0, matmul / (h.peak_flops * np.maximum(efficiency, 1e-9)), 0.0)
    # A causal kernel does half of what is counted.
    scores = 0.5 * attention / (h.peak_flops * k.attention_efficiency)
    rest = k.elementwise_factor * moved / h.memory_bandwidth
    seconds: Floats = np.maximum(product + scores + rest, kernels * k.launch_s)
    return seconds


def _forward(stage: Stage, tokens: Floats, h: Hardware, k: Coefficients) -> Floats:
    return _seconds(
        stage.matmul_flops * tokens,
        stage.attention_flops * tokens,
        stage.elementwise_bytes * tokens,
        stage.kernels,
        h,
        k,
    )


def _backward(stage: Stage, tokens: Floats, h: Hardware, k: Coefficients) -> Floats:
    """Twice the matmuls; an attention kernel's backward does two and a half times its forward."""
    return _seconds(
        2.0 * stage.matmul_flops * tokens,
        2.5 * stage.attention_flops * tokens,
        2.0 * stage.elementwise_bytes * tokens,
        2.0 * stage.kernels,
        h,
        k,
    )


def _again(stage: Stage, policy: Policy, tokens: Floats, h: Hardware, k: Coefficients) -> Floats:
    """What a recompute policy adds to a backward."""
    kept = stage.kept[policy]
    return _seconds(
        kept.recomputed_matmul_flops * tokens,
        kept.recomputed_attention_flops * tokens,
        stage.elementwise_bytes * tokens,
        stage.kernels,
        h,
        k,
    )


# ---- communication --------------------------------------------------------------------------


def _bus_bandwidth(
    size: Ints, in_node: Ints, span: Ints, h: Hardware, k: Coefficients, speedup: float = 1.0
) -> Floats:
    """Bytes per second of a ring: its slowest link.

    Members in one node send to the next node together, each over its own port. `span` devices lie
    between the first and the last member.
    """
    inside = h.link_bandwidth * k.link_efficiency * speedup
    between = h.network_bandwidth * in_node * k.network_efficiency
    between = np.where(
        span > h.pod_nodes * h.devices_per_node, between / h.oversubscription, between
    )
    return np.where(size > in_node, np.minimum(inside, between), inside)


def _latency(size: Ints, in_node: Ints, h: Hardware, k: Coefficients) -> Floats:
    nodes = np.maximum(1.0, size / in_node)
    within = np.minimum(size, in_node) - 1.0
    return k.hop_latency_s * within + k.network_latency_s * np.log2(nodes)


def _ring(message: Floats, size: Ints, h: Hardware, k: Coefficients) -> Floats:
    """All-gather or reduce-scatter of a whole group's message; a group fills node after node."""
    n = size[:, None].astype(np.float64)
    in_node = np.full_like(size, h.devices_per_node)
    wire = message * (n - 1) / n / _bus_bandwidth(size, in_node, size, h, k)[:, None]
    return wire + _latency(size, in_node, h, k)[:, None]


def _in_buckets(units: ModelUnits, messages: Floats, c: Configurations) -> Floats:
    """What is all-reduced after the head, after each block, and at the end; 0 where nothing is.

    DDP waits until a bucket is full; its first is a small one, unless a size was asked for. The
    head is the part of the root that the backward makes first.
    """
    head = float(sum(p.numel for p in units.root.parameters if p.after_blocks)) * c.reduce_bytes
    blocks, root = messages[:, :-1], messages[:, -1]
    ddp = ~c.sharded
    asked = c.bucket_bytes > 0
    first = np.where(asked, c.bucket_bytes, FIRST_BUCKET_BYTES)
    others = np.where(asked, c.bucket_bytes, BUCKET_BYTES)
    across = c.replicate > 1
    found = np.where(across[:, None], blocks, 0.0)
    early = np.where(ddp & across & (head >= first), head, 0.0)
    waiting = np.where(ddp & across, head - early, 0.0)
    cap = np.where(early > 0, others, first)
    for block in reversed(range(blocks.shape[1])):
        waiting = waiting + found[:, block]
        full = waiting >= cap
        found[:, block] = np.where(ddp, np.where(full, waiting, 0.0), found[:, block])
        waiting = np.where(full, 0.0, waiting)
        cap = np.where(full, others, cap)
    last = np.where(across, np.where(ddp, root - head + waiting, root), 0.0)
    return np.concatenate([early[:, None], found, last[:, None]], axis=1)


def _all_reduce(message: Floats, c: Configurations, h: Hardware, k: Coefficients) -> Floats:
    """Across replicas: of whole gradients (DDP), or of shards, every device its own.

    Replicas of a shard lie one shard group apart: several to a node, or one in every few.
    """
    n = c.replicate[:, None].astype(np.float64)
    in_node = np.maximum(1, h.devices_per_node // c.shard)
    span = c.replicate * c.shard
    bandwidth = _bus_bandwidth(c.replicate, in_node, span, h, k, k.reduce_speedup)[:, None]
    wire = 2.0 * message / c.shard[:, None] * (n - 1) / n / bandwidth
    return wire + 2.0 * _latency(c.replicate, in_node, h, k)[:, None]
