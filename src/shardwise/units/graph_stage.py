"""The Stage of a graph: its FLOPs, the bytes it saves, and its memory in forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

from shardwise.units.division import Exchanges, join_exchanges
from shardwise.units.graph import Graph, Op, Value
from shardwise.units.stage import POLICIES, Kept, Moment, Policy, Stage, mean_width, prune


class _Memory(NamedTuple):
    """Memory during the operations of a pass, by their index, and bytes alive between them."""

    moments: list[tuple[int, Moment]]
    # Bytes per token after each operation in the order of the pass, gradients not included.
    alive: dict[int, float]

    def front(self, ops: range) -> tuple[Moment, ...]:
        """The possible peaks during these operations, with the gradients that they make."""
        during = [moment for index, moment in self.moments if index in ops]
        before = [m.gradient_elements for index, m in self.moments if index >= ops.stop]
        made = max(before, default=0.0)
        return prune([m._replace(gradient_elements=m.gradient_elements - made) for m in during])


class _Passes(NamedTuple):
    """Memory of a forward, of one in which autograd saves nothing, and of a backward."""

    forward: _Memory
    unsaved: _Memory
    backward: _Memory


def stage_of(graph: Graph, compiled: bool = False) -> Stage:
    """The Stage of these operations: FLOPs, bytes, and memory of forward and backward."""
    saves = _saved_values(graph, compiled)
    nothing: list[tuple[Value, ...]] = [() for _ in graph.ops]
    passes = _Passes(_forward(graph, saves), _forward(graph, nothing), _backward(graph, saves))
    every = range(len(graph.ops))
    stage = _stage(graph, every, saves, passes, compiled)
    if graph.divided is None:
        return stage
    bounds = (0, *graph.divided, len(graph.ops))
    parts = (
        replace(
            _stage(graph, range(start, stop), saves, passes, compiled),
            of_experts=start == graph.divided[0],
            before_bytes=passes.forward.alive.get(start - 1, 0.0),
            after_bytes=passes.backward.alive.get(start, 0.0),
        )
        for start, stop in pairwise(bounds)
    )
    return replace(stage, parts=tuple(parts))


def _stage(
    graph: Graph, run: range, saves: list[tuple[Value, ...]], passes: _Passes, compiled: bool
) -> Stage:
    """The Stage of some of the operations, given as indices; what it keeps is of all of them."""
    ops = graph.ops[run.start : run.stop]
    return Stage(
        matmul_flops=sum(op.matmul_flops for op in ops),
        attention_flops=sum(op.attention_flops for op in ops),
        attention_span=max((op.attention_span for op in ops), default=0),
        head_dim=min((op.head_dim for op in ops if op.head_dim), default=128),
        elementwise_bytes=_elementwise_bytes(ops),
        fused_bytes=_fused_bytes(graph, ops) if compiled else 0.0,
        kernels=sum(op.output.base is None for op in ops),
        products=sum(op.matmul_flops > 0 for op in ops),
        product_width=mean_width(
            (op.matmul_flops, op.output.width / (op.routed or 1.0)) for op in ops
        ),
        grouped_flops=sum(op.matmul_flops for op in ops if op.routed),
        routed=max((op.routed for op in ops), default=0.0),
        experts=graph.experts if any(op.routed for op in ops) else 0,
        logits=sum(op.output.width for op in ops if op.matmul_flops > 0 and op.output.logits),
        logit_moved=_elementwise_bytes(ops, logits=True),
        compiled=compiled,
        gradient_flops=sum(op.gradient_flops for op in ops),
        kept={policy: _kept(graph, run, policy, saves) for policy in POLICIES},
        forward=passes.forward.front(run),
        forward_unsaved=passes.unsaved.front(run),
        backward=passes.backward.front(run),
        exchanges=_exchanges(graph, run),
    )


def _elementwise_bytes(ops: Sequence[Op], *, logits: bool = False) -> float:
    """Bytes per token that the element-wise among operations read and write, one by one.

    With `logits`, only of those that read logits.
    """
    pointwise = [op for op in ops if op.pointwise]
    if logits:
        pointwise = [op for op in pointwise if any(x.logits for x in op.inputs)]
    return sum(op.output.bytes + sum(x.storage.bytes for x in op.inputs) for op in pointwise)


def _fused_bytes(graph: Graph, run: Sequence[Op]) -> float:
    """Bytes per token that element-wise operations read and write when fused by a compiler.

    Neighbouring operations run in one kernel, of which only inputs and outputs count. A matmul
    or attention between two operations separates their kernels.
    """
    group: dict[Op, int] = {}
    # An in-place operation produces a value again: the last producer so far counts.
    made_by: dict[Value, Op] = {}
    # Number of matmuls and attentions on the longest path to an operation.
    behind: dict[Op, int] = {}
    members: list[list[Op]] = []
    for op in run:
        before = [made_by[x] for x in op.inputs if x in made_by]
        behind[op] = max((behind[one] + (not one.pointwise) for one in before), default=0)
        made_by[op.output] = op
        if not op.pointwise:
            continue
        near = [one for one in before if one in group and behind[one] == behind[op]]
        joined = sorted({group[one] for one in near})
        number = joined[0] if joined else len(members)
        if not joined:
            members.append([])
        for other in joined[1:]:
            members[number] += members[other]
            members[other] = []
        members[number].append(op)
        group.update(dict.fromkeys(members[number], number))
    return sum(_kernel_bytes(graph, set(ops)) for ops in members)


def _kernel_bytes(graph: Graph, ops: set[Op]) -> float:
    """Bytes per token that one kernel of these operations reads and writes."""
    made = {op.output for op in ops}
    read = {x for op in ops for x in op.inputs} - made
    outside = [op for op in graph.ops if op not in ops]
    needed = {x for op in outside for x in op.inputs} | {graph.ops[-1].output}
    return sum(value.bytes for value in read | (made & needed))


def _exchanges(graph: Graph, run: range) -> Exchanges:
    """All collectives of some of the operations, by the pass in which they run."""
    stop = _recompute_stop(graph)
    ops = graph.ops[run.start : run.stop]
    again = graph.ops[run.start : max(0, min(stop, run.stop))]
    return Exchanges(
        forward=join_exchanges([one for op in ops for one in op.sent]),
        backward=join_exchanges([one for op in reversed(ops) for one in op.returned]),
        again=join_exchanges([one for op in again for one in op.sent]),
        reduced=join_exchanges(graph.reduced),
    )


def _saved_values(graph: Graph, compiled: bool) -> list[tuple[Value, ...]]:
    """The values saved for the backward, for each operation."""
    if not compiled:
        return [op.saves for op in graph.ops]
    # A compiler recomputes element-wise results in the backward from their inputs, unless a
    # matmul or attention needs them there.
    made_by = {op.output: op for op in graph.ops if op.pointwise}

    def origins(value: Value) -> tuple[Value, ...]:
        op = made_by.get(value)
        # The residual stream is saved: recomputing it would cross the block's boundary.
        if op is None or op.alias:
            return (value,)
        return tuple(dict.fromkeys(o for x in op.inputs for o in origins(x)))

    return [
        tuple(dict.fromkeys(o for saved in op.saves for o in origins(saved)))
        if op.pointwise
        else op.saves
        for op in graph.ops
    ]


def _kept(graph: Graph, run: range, policy: Policy, saves: list[tuple[Value, ...]]) -> Kept:
    """Bytes saved per token under a recompute policy, and FLOPs recomputed of some operations."""
    saved = _unique(saves)
    if policy == "none":
        return Kept(activation_bytes=_bytes(saved, False), logit_bytes=_bytes(saved, True))
    stop = _recompute_stop(graph)
    again = graph.ops[run.start : max(0, min(stop, run.stop))]
    if policy == "full":
        kept = [graph.input]
    else:
        chosen = _saved_by_selective(graph)
        kept = [graph.input]
        for op in chosen:
            # An attention kernel also returns its statistics.
            extra = [s for s in op.saves if s not in op.inputs and s is not op.output]
            kept += [op.output, *extra]
        again = [op for op in again if op not in chosen]
    return Kept(
        activation_bytes=_bytes(kept, False),
        logit_bytes=_bytes(kept, True),
        recomputed_matmul_flops=sum(op.matmul_flops for op in again),
        recomputed_attention_flops=sum(op.attention_flops for op in again),
        unread_bytes=_bytes([value for value in kept if value not in saved], None),
    )


def _saved_by_selective(graph: Graph) -> list[Op]:
    """Operations whose outputs selective recompute saves: attention and every other matmul.

    Grouped products of all experts are not among the operations that torch then saves.
    """
    matmuls = [op for op in graph.ops if op.matmul_flops > 0 and not op.routed]
    return [op for op in graph.ops if op.attention_flops > 0] + matmuls[::2]


def _recompute_stop(graph: Graph) -> int:
    """Index of the first operation that recomputation does not run.

    torch stops as soon as the last saved tensor exists. Inputs are saved before a kernel
    runs, so the last matmul of a block, which saves its input only, is not recomputed.
    """
    last = max((i for i, op in enumerate(graph.ops) if op.saves), default=-1)
    return last + 1 if last >= 0 and graph.ops[last].saves_own_output else last


def _forward(graph: Graph, saves: list[tuple[Value, ...]]) -> _Memory:
    """Memory during each operation of the forward, if it saves `saves`."""
    last_use: dict[Value, int] = {}
    for index, op in enumerate(graph.ops):
        for x in (*op.inputs, op.output, *op.holds):
            last_use[x.storage] = index
    held: dict[Value, None] = {graph.input: None}
    moments: list[tuple[int, Moment]] = []
    alive: dict[int, float] = {}
    transient: dict[Value, None] = {}
    made: dict[Value, None] = {}
    for index, op in enumerate(graph.ops):
        held |= dict.fromkeys(saved.storage for saved in saves[index])
        if op.quantised:
            moments.append((index, _moment({**held, **transient}, 0.0, op, op.dequantising)))
        transient[op.output.storage] = None
        named = [v for v in graph.named if v in transient or v in made]
        made[op.output] = None
        live = {**held, **transient, **dict.fromkeys(named)}
        moments.append((index, _moment(live, 0.0, op, float(graph.itemsize), op.scratch)))
        transient = {v: None for v in transient if last_use[v] > index}
        alive[index] = _bytes({**held, **transient}, False)
    return _Memory(moments, alive)


def _backward(graph: Graph, saves: list[tuple[Value, ...]]) -> _Memory:
    """Memory during each operation of the backward, after which its saved values are freed."""
    readers: dict[Value, int] = {}
    for saved in saves:
        for value in saved:
            readers[value.storage] = readers.get(value.storage, 0) + 1
    held = dict.fromkeys(readers)
    gradients: dict[Value, Value] = {graph.ops[-1].output: graph.ops[-1].output}
    made_elements = 0.0
    moments: list[tuple[int, Moment]] = []
    alive: dict[int, float] = {}
    for index in reversed(range(len(graph.ops))):
        op, saved = graph.ops[index], saves[index]
        outgoing = gradients.pop(op.output, None)
        if outgoing is None:
            continue
        joined = [gradients.pop(other) for other in op.others]
        if op.quantised:
            live = [*held, *dict.fromkeys((outgoing, *gradients.values()))]
            moments.append((index, _moment(live, made_elements, op, op.dequantising)))
        fresh: list[Value] = []
        for x in op.inputs:
            if not x.needs:
                continue
            if op.alias:
                gradients.setdefault(x, outgoing)
                continue
            made = Value(x.width, x.itemsize, x.logits)
            fresh.append(made)
            gradients.setdefault(x, made)
        if op.reduces_in_backward:
            fresh.append(Value(op.output.width, op.output.itemsize, op.output.logits))
        made_elements += op.parameter_elements
        live = [*held, *dict.fromkeys((outgoing, *joined, *gradients.values(), *fresh))]
        scratch = op.backward_scratch
        moment = _moment(live, made_elements, op, float(graph.itemsize), scratch)
        moments.append((index, moment))
        for value in saved:
            readers[value.storage] -= 1
            if readers[value.storage] == 0:
                del held[value.storage]
        alive[index] = _bytes([*held, *dict.fromkeys(gradients.values())], False)
    return _Memory(moments, alive)


def _unique(saves: Sequence[tuple[Value, ...]]) -> list[Value]:
    """All saved values, each once."""
    return list(dict.fromkeys(value.storage for saved in saves for value in saved))


def _moment(
    live: Sequence[Value] | dict[Value, None],
    gradients: float,
    op: Op,
    copied_bytes: float,
    scratch: float = 0.0,
) -> Moment:
    """The memory of these live values and of temporaries, during an operation.

    `gradients` is the number of gradient elements so far; `copied_bytes` is bytes per element of a
    copy of the operation's matrix, if the matrix can be quantised.
    """
    logits = op.output.logits
    return Moment(
        activation_bytes=_bytes(live, False) + (0.0 if logits else scratch),
        logit_bytes=_bytes(live, True) + (scratch if logits else 0.0),
        gradient_elements=gradients,
        copied=op.quantised,
        copied_bytes=copied_bytes if op.quantised else 0.0,
    )


def _bytes(values: Sequence[Value] | dict[Value, None], logits: bool | None) -> float:
    """Bytes per token of values: only logits, only others, or all for None."""
    return sum(v.bytes for v in values if logits is None or v.logits == logits)
