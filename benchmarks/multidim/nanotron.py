"""Nanotron's grid of Llama shapes on H100 nodes: how that stack runs a step, and its memory.

What a device computes, exchanges inside blocks and keeps for the backward is predicted as for any
other run, with the coefficients of the catalogue. What differs from PyTorch's engine is stated
here as behaviour of the stack:

- The host is slow. A block takes `host_s` at least. For each further node that a tensor group
  spans, it waits `host_node_s`; collectives between nodes then overlap with compute.
- Runs of an older version take `old_host_s` per block and device of the tensor group at least, and
  gather inputs of matrices again in the backward instead of keeping them.
- Gradients are added to fp32 accumulators after each micro-batch. They are all-reduced in fp32
  after the last one, not overlapped, also under ZeRO-1, which then gathers bf16 parameters.
- Collectives between nodes run at the bandwidth that the same source measured.

Coefficients are fitted on rows with `split=fit`, which are also the only ones that the form was
chosen on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from benchmarks.multidim.fit import fit
from benchmarks.multidim.rows import (
    GIB,
    Layout,
    Measured,
    Numbers,
    Run,
    llama,
    memory_errors,
    read_table,
    regret,
    summary,
    throughput_errors,
)
from benchmarks.validation import Column, measured_bandwidths
from shardwise.predict.compute import backward_s, forward_s
from shardwise.predict.kernels import coefficients_of
from shardwise.predict.network import all_reduce_s, ring_s
from shardwise.predict.rates import Coefficients, Hardware
from shardwise.spec.catalogue import find_device, step_coefficients
from shardwise.spec.software import find_software
from shardwise.spec.strategy import Strategy
from shardwise.units.decoder import decoder_units
from shardwise.units.division import Division, Exchange
from shardwise.units.unit import ModelUnits

SEQ_LEN, VOCAB, PER_NODE = 4096, 131072, 8
DEVICE = find_device("H100-SXM")
# A limit of published comparisons: bytes of "80 GB".
CAPACITY = 80e9
# Errors of time are judged on so many nodes at most: beyond, siblings that differ in the ZeRO stage
# alone differ by up to 5 times.
JUDGED_NODES = 16

# Bytes per parameter: bf16 parameters and gradients and an fp32 accumulator on every device, the
# fp32 master and AdamW's two states divided by ZeRO-1.
HELD, DIVIDED = 2 + 2 + 4, 4 + 8
# Read a bf16 gradient, read and write its fp32 accumulator.
ACCUMULATED = 2 + 4 + 4
# Bytes per logit of the stack's own loss: bf16 logits, an fp32 copy, its exponentials, and the bf16
# gradient.
LOGIT = 2 + 4 + 4 + 2


class Stack(NamedTuple):
    """What is fitted of the stack's time."""

    host_s: float = 4e-3
    host_node_s: float = 4e-3
    old_host_s: float = 3e-3
    # Bandwidth of gradients as a multiple of the measured one, which is of collectives alone.
    reduce_speed: float = 2.0
    # Latency of that reduction, for each further node.
    reduce_node_s: float = 5e-3
    # Seconds of what a device computes per second predicted.
    level: float = 1.0


class Held(NamedTuple):
    """What is fitted of its memory: bytes of a device that are none of the tensors predicted."""

    gib: float = 0.3


# ---- rows -----------------------------------------------------------------------------------


def read_runs(splits: Iterable[str]) -> list[Run]:
    """Rows without pipeline parallelism whose batch is the one that the grid states."""
    return [
        _run(row)
        for row in read_table("nanotron")
        if row["split"] in splits and row["pp"] == "1" and row["batch_is_256"] == "true"
    ]


def _run(row: dict[str, str]) -> Run:
    layout = _layout(row)
    measured = None
    if row["status"] == "ok":
        measured = Measured(
            step_s=layout.tokens_per_step / float(row["tokens_per_s"]),
            # GiB in the source, whatever the chart calls them.
            memory_bytes=float(row["gpu_memory_gb"]) * GIB,
        )
    return Run(id=row["id"], split=row["split"], layout=layout, measured=measured)


def _layout(row: dict[str, str]) -> Layout:
    model = llama(
        layers=int(row["n_layers"]),
        hidden=int(row["d_model"]),
        heads=int(row["n_heads"]),
        ffn=int(row["d_ff"]),
        vocab=VOCAB,
        max_positions=SEQ_LEN,
        tied=row["tied"] == "true",
    )
    strategy = Strategy.read(
        {
            "kind": "zero1" if row["zero"] == "1" else "ddp",
            "tensor": int(row["tp"]),
            "micro_batch": int(row["mbs"]),
            "accumulate": int(row["grad_accum"]),
        }
    )
    nodes = int(row["nodes"])
    return Layout(model, SEQ_LEN, strategy.resolve(nodes * PER_NODE, PER_NODE), nodes)


def is_old(layout: Layout) -> bool:
    """Whether an older version of the stack made such a run.

    Found on fitted rows: those with several sequences per micro-batch and several replicas on 4
    or 8 nodes, and no others.
    """
    strategy = layout.strategy
    several = strategy.micro_batch > 1 and strategy.data_parallel > 1
    return several and 4 <= layout.nodes <= 8


# ---- columns --------------------------------------------------------------------------------


class Columns:
    """Numbers of several layouts, one row each."""

    def __init__(self, layouts: Sequence[Layout]) -> None:
        def column(values: Iterable[Any]) -> Any:
            return np.asarray(list(values))

        units = [units_of(layout) for layout in layouts]
        self.units = units
        self.block: Any = Column([one.blocks[0].stage for one in units])
        # The stack's loss is a plain one over a part of the vocabulary.
        whole = [decoder_units(layout.model, layout.seq_len).root for layout in layouts]
        self.root: Any = Column([root.stage for root in whole])
        self.layers = column(len(one.blocks) for one in units)
        self.numel = column(one.numel for one in units)
        self.tokens = column(float(layout.tokens) for layout in layouts)
        self.accumulate = column(layout.strategy.accumulate for layout in layouts)
        self.tensor = column(layout.strategy.tensor for layout in layouts)
        self.replicas = column(layout.strategy.data_parallel for layout in layouts)
        self.nodes = column(layout.nodes for layout in layouts)
        self.zero1 = column(layout.strategy.kind == "zero1" for layout in layouts)
        self.old = column(is_old(layout) for layout in layouts)
        # Bytes per token of whole messages inside a block, and of those that gather inputs.
        stages = [one.blocks[0].stage for one in units]
        self.exchanged = column(
            _bytes((*s.exchanges.forward, *s.exchanges.backward)) for s in stages
        )
        self.gathered = column(
            _bytes(e for e in s.exchanges.forward if e.op == "all-gather") for s in stages
        )
        self.exchanged_root = column(
            _bytes((*one.root.stage.exchanges.forward, *one.root.stage.exchanges.backward))
            + _bytes((*one.lookup.forward, *one.lookup.backward))
            for one in units
        )
        self.kept = column(_kept_bytes(one) for one in units)


def _bytes(exchanges: Iterable[Exchange]) -> float:
    return sum(one.bytes for one in exchanges)


def units_of(layout: Layout) -> ModelUnits:
    """Everything in bf16, as the stack computes; an autocast would leave the residual in fp32."""
    return decoder_units(
        layout.model, layout.seq_len, "bf16", division=Division.of(layout.strategy)
    )


def _kept_bytes(units: ModelUnits) -> float:
    """Activations and logits per token when the backward begins: the largest moment of a step."""
    kept = sum(unit.stage.kept["none"].activation_bytes for unit in units.units)
    return kept + LOGIT * VOCAB / units.division.tensor


# ---- time -----------------------------------------------------------------------------------


@cache
def _coefficients() -> Coefficients:
    """Of the catalogue. The stack's floors are its own; messages in a node are sent at once."""
    shipped = coefficients_of(DEVICE, find_software("nanotron"), step_coefficients())
    return shipped._replace(
        launch_s=0.0, link_efficiency=1.0, hop_latency_s=0.0, network_latency_s=0.0
    )


@cache
def _hardware(*, measured: bool) -> Hardware:
    """The nodes; between them, collectives run as measured."""
    peak = DEVICE.peak_flops("bf16")
    assert peak is not None
    return Hardware(
        peak_flops=peak,
        memory_bandwidth=DEVICE.memory_bandwidth,
        link_bandwidth=DEVICE.link_bandwidth,
        network_bandwidth=DEVICE.link_bandwidth,
        devices_per_node=PER_NODE,
        measured=measured_bandwidths() if measured else None,
    )


def step_s(c: Columns, stack: Stack) -> Numbers:
    """Seconds of a step: nothing overlaps."""
    h, k = _hardware(measured=False), _coefficients()
    head = stack.level * _pass_s(c.root, c.tokens / c.tensor) + _ring_s(c, c.exchanged_root)
    accumulating = ACCUMULATED * c.numel / h.memory_bandwidth
    micro_batch = c.layers * _block_s(c, stack) + head + accumulating
    held = c.numel / np.where(c.zero1, c.replicas, 1)
    # Parameter, gradient and two states, in fp32.
    optimizer = k.optimizer_factor * 16.0 * held / h.memory_bandwidth
    seconds: Numbers = c.accumulate * micro_batch + _reduce_s(c, stack) + optimizer
    return seconds


def _block_s(c: Columns, stack: Stack) -> Numbers:
    """Forward and backward of a block: the device's work, unless the host takes longer."""
    again = np.where(c.old, c.gathered, 0.0)
    computed = stack.level * _pass_s(c.block, c.tokens)
    exchanged = _ring_s(c, c.exchanged + again)
    # Only what goes between nodes is long enough to hide compute.
    between = np.maximum(computed, exchanged)
    device = np.where(c.tensor > PER_NODE, between, computed + exchanged)
    waited = stack.host_node_s * np.maximum(0.0, c.tensor / PER_NODE - 1.0)
    block = np.maximum(device, stack.host_s) + waited
    return np.where(c.old, np.maximum(block, stack.old_host_s * c.tensor), block)


def _pass_s(stage: Any, tokens: Numbers) -> Numbers:
    h, k = _hardware(measured=False), _coefficients()
    return forward_s(stage, tokens, h, k) + backward_s(stage, tokens, h, k)


def _ring_s(c: Columns, per_token: Numbers) -> Numbers:
    """All-gathers and reduce-scatters of a tensor group."""
    message, k = per_token * c.tokens, _coefficients()
    inside = ring_s(message, c.tensor, _hardware(measured=False), k)
    between = ring_s(message, c.tensor, _hardware(measured=True), k)
    return np.where(c.tensor <= PER_NODE, inside, between)


def _reduce_s(c: Columns, stack: Stack) -> Numbers:
    """Gradients all-reduced across replicas; ZeRO-1 gathers parameters too."""
    h, k = _hardware(measured=True), _coefficients()
    reduced = all_reduce_s(4.0 * c.numel, c.replicas, c.tensor, h, k)
    gathered = ring_s(2.0 * c.numel, c.replicas, h, k, c.tensor)
    moved = reduced + np.where(c.zero1, gathered, 0.0)
    return moved / stack.reduce_speed + stack.reduce_node_s * (c.nodes - 1.0)


# ---- memory ---------------------------------------------------------------------------------


def memory_bytes(c: Columns, held: Held) -> Numbers:
    """Peak of rank 0: states of the stack, activations and logits as predicted for any run."""
    states = c.numel * (HELD + DIVIDED / np.where(c.zero1, c.replicas, 1))
    # Inputs of matrices that are gathered again need not be kept, but for the device's own part.
    saved = np.where(c.old, c.gathered * (1.0 - 1.0 / c.tensor) * c.tokens * c.layers, 0.0)
    total: Numbers = states + c.kept * c.tokens - saved + held.gib * GIB
    return total


# ---- study ----------------------------------------------------------------------------------


class Fitted(NamedTuple):
    """Coefficients, and the runs they come from."""

    stack: Stack
    held: Held
    runs: list[Run]


def fit_stack(runs: Sequence[Run]) -> Fitted:
    ran = [run for run in runs if run.measured]
    c = Columns([run.layout for run in ran])
    seconds = np.asarray([run.measured.step_s for run in ran if run.measured])
    taken = np.asarray([run.measured.memory_bytes for run in ran if run.measured])
    return Fitted(
        fit(Stack(), lambda stack: step_s(c, stack), seconds),
        fit(Held(), lambda held: memory_bytes(c, held), taken),
        ran,
    )


# Parts of the runs that are judged on their own: nodes from and to, devices of a tensor group.
PARTS = {
    "tensor groups inside a node": (1, JUDGED_NODES, 2, PER_NODE),
    "tensor groups across nodes": (1, JUDGED_NODES, 2 * PER_NODE, 64),
    "up to 8 nodes": (1, 8, 2, 64),
    "16 nodes": (16, 16, 2, 64),
    "32 nodes": (32, 32, 2, 64),
    "64 nodes": (64, 64, 2, 64),
}


def judge(runs: Sequence[Run], fitted: Fitted) -> dict[str, Any]:
    """Errors of time, of memory, and of the verdict whether a run fits."""
    ran = [run for run in runs if run.measured]
    c = Columns([run.layout for run in ran])
    seconds = step_s(c, fitted.stack)
    errors = throughput_errors(ran, seconds)
    near = c.nodes <= JUDGED_NODES
    judged = [run for run, within in zip(ran, near, strict=True) if within]
    lost = regret(judged, seconds[near], _grid)
    parts = {
        name: (first <= c.nodes) & (c.nodes <= last) & (least <= c.tensor) & (c.tensor <= most)
        for name, (first, last, least, most) in PARTS.items()
    }
    return {
        "time": summary(errors[near]),
        "parts": {name: summary(errors[part]) for name, part in parts.items() if part.any()},
        "regret": {"grids": len(lost), "median": float(np.median(lost)), "largest": max(lost)},
        **_judge_memory(runs, fitted.held),
    }


def _judge_memory(runs: Sequence[Run], held: Held) -> dict[str, Any]:
    ran = [run for run in runs if run.measured]
    taken = memory_bytes(Columns([run.layout for run in ran]), held)
    crashed = [run.layout for run in runs if not run.measured]
    needed = memory_bytes(Columns(crashed), held)
    return {
        "memory": summary(memory_errors(ran, taken)),
        "oom": {
            "crashed": len(crashed),
            "ran": len(ran),
            "caught": float((needed > CAPACITY).mean()),
            "false_alarms": float((taken > CAPACITY).mean()),
        },
    }


def _grid(run: Run) -> object:
    return run.layout.model, run.layout.nodes
