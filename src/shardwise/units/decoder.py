"""Units of a decoder-only transformer, from its ModelSpec alone (no torch).

Functions that take a Graph record operations on it and return the output value. They record what
PyTorch and transformers run in eager mode with fused attention, because that decides what is saved
for the backward.
"""

from __future__ import annotations

import math
from functools import lru_cache, partial

from shardwise.spec.adapter import ALL_LINEAR
from shardwise.spec.dtype import DTYPE_BYTES, DType
from shardwise.spec.families import linear_names
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError, did_you_mean
from shardwise.units.division import (
    UNDIVIDED,
    Division,
    Exchange,
    Exchanges,
    Operation,
    expert_counts,
)
from shardwise.units.graph import FP32, INT64, Graph, Value
from shardwise.units.graph_stage import stage_of
from shardwise.units.norm import norm
from shardwise.units.unit import ModelUnits, Parameter, Unit


@lru_cache(maxsize=256)
def decoder_units(
    model: ModelSpec,
    seq_len: int,
    dtype: DType = "bf16",
    compiled: bool = False,
    autocast: bool = False,
    division: Division = UNDIVIDED,
    eager: bool = False,
) -> ModelUnits:
    """The units of `model` on one device, at sequence length `seq_len` and compute dtype `dtype`.

    With `autocast`, only matmuls and attention compute in `dtype`; otherwise everything does, as
    under a mixed-precision policy of fully_shard. With `eager`, attention keeps its scores.
    """
    model.check_seq_len(seq_len)
    _check_targets(model)
    division.check(model, seq_len)
    whole, model = model, _part(model, division.tensor)
    itemsize = DTYPE_BYTES[dtype]
    # Under autocast the residual stream has the dtype of the stored weights.
    stored = DTYPE_BYTES[model.adapter.float_dtype] if model.adapter else FP32
    stream = stored if autocast else itemsize
    # With an adapter nothing before the first block is trained, so its input needs no gradient.
    keys = [
        (model.attention_span(layer, seq_len), layer > 0 or model.adapter is None)
        for layer in range(model.layers)
    ]
    kinds = {
        key: _block(model, *key, itemsize, stream, division, compiled, eager)
        for key in dict.fromkeys(keys)
    }
    embeddings = _embeddings(model, _graph(model, itemsize, stream, division))
    return ModelUnits(
        name=model.name,
        seq_len=seq_len,
        root=_root(model, itemsize, stream, division),
        blocks=tuple(kinds[key] for key in keys),
        tied=model.tied,
        boundary_bytes=model.hidden / division.between * stream,
        embedding_gradient_elements=sum(p.numel for p in embeddings if p.trainable),
        division=division,
        lookup=_lookup(model, division, stream),
        lookup_bytes=float(model.hidden * stream) if division.between > 1 else 0.0,
        whole_numel=decoder_units(whole, seq_len).numel if division.of_parameters else None,
        whole_table=whole.vocab * whole.hidden if division.tensor > 1 else 0,
    )


def _part(model: ModelSpec, tensor: int) -> ModelSpec:
    """The model as the first device of a tensor group holds it, which holds the most.

    Heads, MLP width and vocabulary are divided by `tensor`, rounded up.
    """
    if tensor == 1:
        return model
    sizes = ("heads", "kv_heads", "ffn", "vocab")
    return model.model_copy(update={name: -(-getattr(model, name) // tensor) for name in sizes})


def _lookup(model: ModelSpec, division: Division, stream: int) -> Exchanges:
    """The collectives of an embedding lookup in a table that is divided along the vocabulary.

    Each device looks up its own rows and gets zeros for others; the results are summed.
    """
    if division.tensor == 1:
        return Exchanges()
    size = float(model.hidden * stream)
    if not division.sequence:
        return Exchanges(forward=(_tensor_exchange("all-reduce", size),))
    gathered, scattered = (
        _tensor_exchange("all-gather", size),
        _tensor_exchange("reduce-scatter", size),
    )
    # A scaled embedding sums the lookups of all devices before it scales them.
    found = _tensor_exchange("all-reduce", size) if model.scaled_embedding else scattered
    return Exchanges(forward=(found,), backward=(gathered,))


def _tensor_exchange(op: Operation, size: float, calls: int = 1) -> Exchange:
    """Collectives of a tensor group, `size` bytes per token over all calls."""
    return Exchange("tensor", op, size, calls=calls)


def _enter_tensor_parallel(graph: Graph, model: ModelSpec, x: Value) -> Value:
    """Record the collective before column-parallel matrices, which need all tokens of a group."""
    division = graph.division
    if division.tensor == 1:
        return x
    size = float(model.hidden * x.itemsize)
    if not division.sequence:
        return graph.exchange(x, model.hidden, (), (_tensor_exchange("all-reduce", size),))
    gathered, scattered = (
        _tensor_exchange("all-gather", size),
        _tensor_exchange("reduce-scatter", size),
    )
    return graph.exchange(x, model.hidden, (gathered,), (scattered,), scratch=size)


def _leave_tensor_parallel(graph: Graph, model: ModelSpec, x: Value) -> Value:
    """Record the collective after a row-parallel matrix, which sums the outputs of a group."""
    division = graph.division
    if division.tensor == 1:
        return x
    size = float(model.hidden * x.itemsize)
    if not division.sequence:
        return graph.exchange(x, model.hidden, (_tensor_exchange("all-reduce", size),), ())
    gathered, scattered = (
        _tensor_exchange("all-gather", size),
        _tensor_exchange("reduce-scatter", size),
    )
    width = model.hidden / division.tensor
    return graph.exchange(x, width, (scattered,), (gathered,), scratch=size)


def _check_targets(model: ModelSpec) -> None:
    """Raise SpecError if the adapter targets a layer that the model does not have."""
    adapter = model.adapter
    if adapter is None or adapter.rank is None or adapter.targets == (ALL_LINEAR,):
        return
    names = [*linear_names(model.family).values(), "lm_head"]
    for target in adapter.targets:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            known = sorted({name.rpartition(".")[2] for name in names})
            hint = did_you_mean(target, known) or f"; known are {', '.join(known)}"
            raise SpecError(f"adapter.targets: {model.name} has no linear layer {target!r}{hint}")


def _graph(
    model: ModelSpec, itemsize: int, stream: int, division: Division, needs: bool = True
) -> Graph:
    """An empty graph whose input is the residual stream; `needs`: the input needs a gradient."""
    return Graph(
        itemsize=itemsize,
        input=Value(model.hidden / division.between, stream, needs=needs),
        adapter=model.adapter,
        division=division,
        linear_names=linear_names(model.family),
    )


def _block(
    model: ModelSpec,
    span: int,
    needs: bool,
    itemsize: int,
    stream: int,
    division: Division,
    compiled: bool,
    eager: bool,
) -> Unit:
    """The unit of one block that attends to `span` keys; `needs`: its input needs a gradient."""
    graph = _graph(model, itemsize, stream, division, needs)
    graph.eager = eager
    x = graph.input
    if model.layout in ("parallel", "parallel_two_norms"):
        normed = norm(graph, model, x, "attention_norm")
        mixed = _dropout(graph, model, _attention(graph, model, normed, span))
        if model.layout == "parallel_two_norms":
            normed = norm(graph, model, x, "mlp_norm")
        branch = _dropout(graph, model, _mlp(graph, model, normed))
        graph.residual(x, graph.residual(mixed, branch))
    else:
        before, after = model.layout != "post", model.layout in ("post", "sandwich")
        for name, layer in (("attention", _attention), ("mlp", _mlp)):
            branch = norm(graph, model, x, f"{name}_norm") if before else x
            branch = layer(graph, model, branch, span)
            branch = norm(graph, model, branch, f"{name}_post_norm") if after else branch
            x = graph.residual(x, _dropout(graph, model, branch))
    return Unit(name="block", parameters=tuple(graph.parameters), stage=stage_of(graph, compiled))


def _root(model: ModelSpec, itemsize: int, stream: int, division: Division) -> Unit:
    """The root unit: embeddings, final norm, head and loss.

    Only blocks are compiled: head and loss run in eager mode.
    """
    graph = _graph(model, itemsize, stream, division)
    embeddings = _embeddings(model, graph)
    graph.parameters.clear()
    normed = _enter_tensor_parallel(graph, model, norm(graph, model, graph.input, "final_norm"))
    logits = graph.linear(
        normed, "head", model.vocab, bias=model.head_bias, logits=True, tied=model.tied
    )
    if model.final_softcap:
        scaled = graph.pointwise(logits)
        logits = graph.pointwise(graph.pointwise(scaled, save_output=True))
    graph.named.append(logits)
    # Cross-entropy in fp32, as transformers computes it: log-softmax keeps its output.
    upcast = graph.cast(logits, max(FP32, itemsize))
    log_probabilities = _log_softmax(graph, upcast)
    loss = Value(1, FP32)
    graph.pointwise(log_probabilities, output=loss)
    head = tuple(p._replace(after_blocks=True) for p in graph.parameters)
    return Unit(name="root", parameters=(*embeddings, *head), stage=stage_of(graph))


def _log_softmax(graph: Graph, logits: Value) -> Value:
    """Record the log-softmax of the logits.

    If the vocabulary is divided, ranks all-reduce the largest logit, the sum of exponentials and
    the loss of each token.
    """
    if graph.division.tensor == 1:
        return graph.pointwise(logits, save_output=True)
    made = graph.pointwise(logits, save_output=True)
    # Temporaries: exponentials in the forward, an out-of-place gradient in the backward.
    graph.ops[-1].scratch = graph.ops[-1].backward_scratch = logits.bytes
    graph.ops[-1].sent = (_tensor_exchange("all-reduce", 3.0 * logits.itemsize, calls=3),)
    return made


def _embeddings(model: ModelSpec, graph: Graph) -> tuple[Parameter, ...]:
    """Record the embedding tables of tokens and positions, and return all parameters so far."""
    graph.parameter("embedding.weight", model.vocab, model.hidden)
    if model.positions == "learned":
        rows = model.max_positions + model.position_offset
        graph.parameter("positions.weight", rows, model.hidden)
    return tuple(graph.parameters)


def _attention(graph: Graph, model: ModelSpec, x: Value, span: int) -> Value:
    """Record the attention layer: projections, rotary positions, attention and output matrix."""
    width, kv_width = model.heads * model.head_dim, model.kv_heads * model.head_dim
    bias, transposed = model.attention_bias, model.transposed_weights
    x = _enter_tensor_parallel(graph, model, x)
    if model.qkv == "fused":
        joined = graph.linear(
            x, "attention.qkv", width + 2 * kv_width, bias=bias, transposed=transposed
        )
        q = k = v = joined
    else:
        q = graph.linear(x, "attention.q", width, bias=bias, transposed=transposed)
        k = graph.linear(x, "attention.k", kv_width, bias=bias, transposed=transposed)
        v = graph.linear(x, "attention.v", kv_width, bias=bias, transposed=transposed)
    if model.qk_norm != "none":
        q = norm(graph, model, q, "attention.q_norm", heads=model.heads)
        k = norm(graph, model, k, "attention.k_norm", heads=model.kv_heads)
    if model.positions == "rope":
        # Rotated copies; with fused projections v stays a view of the joined tensor. The rotary
        # tables and the rotated tensors have the residual stream's dtype.
        q = graph.pointwise(q, output=graph.value(width, graph.input.itemsize))
        k = graph.pointwise(k, output=graph.value(kv_width, graph.input.itemsize))
    mixed = _attend(graph, model, q, k, v, span)
    made = graph.linear(
        mixed, "attention.out", model.hidden, bias=model.output_bias, transposed=transposed
    )
    return _leave_tensor_parallel(graph, model, made)


def _attend(graph: Graph, model: ModelSpec, q: Value, k: Value, v: Value, span: int) -> Value:
    """Record attention over full sequences, with the collectives of context parallelism."""
    width, division = model.heads * model.head_dim, graph.division
    attention = partial(graph.attention, heads=model.heads, width=width, span=span)
    if division.context == 1:
        return attention(q, k, v)
    if division.method == "ring":
        # Keys and values are gathered in both passes; their gradients are passed around the ring.
        both = 2.0 * model.kv_heads * model.head_dim * graph.itemsize
        gathered = Exchange("context", "all-gather", division.context * both)
        passed = Exchange("context", "all-to-all", division.context * both, calls=division.context)
        scratch = division.context * both
        return attention(q, k, v, sent=(gathered,), returned=(gathered, passed), scratch=scratch)
    # Ulysses: each device gets all tokens of some heads instead of some tokens of all heads.
    heads = math.lcm(model.kv_heads, division.context)
    if heads != model.kv_heads:
        repeated = heads * model.head_dim
        k, v = (graph.pointwise(x, output=graph.value(repeated, x.itemsize)) for x in (k, v))
    mixed = attention(*(_to_heads(graph, x) for x in (q, k, v)))
    return _to_heads(graph, mixed)


def _to_heads(graph: Graph, x: Value) -> Value:
    """Record the all-to-all that exchanges tokens for heads, or back; the size does not change."""
    exchanged = (Exchange("context", "all-to-all", x.bytes),)
    return graph.exchange(x, x.width, exchanged, exchanged, scratch=x.bytes)


def _mlp(graph: Graph, model: ModelSpec, x: Value, span: int = 0) -> Value:
    """Record the MLP or the experts; `span` is ignored, as this is called like `_attention`."""
    if model.experts is not None:
        return _experts(graph, model, x)
    bias, transposed = model.mlp_bias, model.transposed_weights
    x = _enter_tensor_parallel(graph, model, x)
    if model.mlp == "plain":
        up = graph.linear(x, "mlp.up", model.ffn, bias=bias, transposed=transposed)
        product = _activation(graph, model, up)
    elif model.mlp == "gated_fused":
        joined = graph.linear(x, "mlp.gate_up", 2 * model.ffn, bias=bias)
        product = _gated(graph, model, *graph.halves(joined))
    else:
        gate = graph.linear(x, "mlp.gate", model.ffn, bias=bias)
        up = graph.linear(x, "mlp.up", model.ffn, bias=bias)
        product = _gated(graph, model, gate, up)
    made = graph.linear(product, "mlp.down", model.hidden, bias=bias, transposed=transposed)
    return _leave_tensor_parallel(graph, model, made)


def _gated(graph: Graph, model: ModelSpec, gate: Value, up: Value, copies: float = 1) -> Value:
    """Record activation(gate) · up; `copies` is the number of experts per token."""
    active = _activation(graph, model, gate, graph.value(copies * model.ffn))
    return graph.pointwise(active, up, saves=(active, up))


def _activation(graph: Graph, model: ModelSpec, x: Value, output: Value | None = None) -> Value:
    if model.activation == "relu":
        return graph.pointwise(x, save_output=True, output=output)
    if model.activation != "gelu_new":
        return graph.pointwise(x, saves=(x,), output=output)
    # transformers computes this as 0.5·x · (1 + tanh(c·(x + 0.044715·x³))).
    inner = graph.pointwise(x, saves=(x,))
    curve = graph.pointwise(inner, save_output=True)
    one_plus = graph.pointwise(curve)
    half = graph.pointwise(x)
    return graph.pointwise(half, one_plus, saves=(half, one_plus), output=output)


def _experts(graph: Graph, model: ModelSpec, x: Value) -> Value:
    """Record a mixture of experts: every token is routed to `experts_per_token` experts.

    Assumes an even load; the actual load depends on the routing.
    """
    assert model.experts is not None
    assert model.experts_per_token is not None
    if graph.division.expert > 1:
        return _divided_experts(graph, model, x)
    chosen = model.experts_per_token
    scores = graph.linear(x, "mlp.router", model.experts)
    probabilities = graph.pointwise(graph.cast(scores, FP32), save_output=True)
    weights = _chosen_weights(graph, probabilities, chosen)
    gathered = graph.pointwise(
        x, output=graph.value(chosen * model.hidden), saves=(_order(chosen),)
    )
    up, narrow = _expert_matrices(model, model.experts)
    joined = graph.stacked(gathered, "mlp.experts.gate_up", up, chosen)
    product = _gated(graph, model, *graph.halves(joined), copies=chosen)
    down = graph.stacked(product, "mlp.experts.down", narrow, chosen)
    weighted = graph.pointwise(down, weights, saves=(down, weights))
    made = graph.pointwise(weighted, output=graph.value(model.hidden), saves=(_order(chosen),))
    # The forward of stored experts keeps no variable of the rows that it gathered.
    stored = model.adapter is not None and model.adapter.quantises_experts
    graph.hold(*((x,) if stored else (x, gathered)))
    return made


def _chosen_weights(graph: Graph, probabilities: Value, chosen: int) -> Value:
    """Record the choice of the most probable experts; returns their weights."""
    output = graph.value(chosen, FP32)
    return graph.pointwise(probabilities, output=output, saves=(_order(chosen),))


def _order(rows: float) -> Value:
    """The integers by which rows are chosen or put in order, which autograd keeps."""
    return Value(rows, INT64)


def _expert_matrices(
    model: ModelSpec, experts: int
) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """The shapes of the stacked matrices of `experts` experts: gate and up, and down."""
    return (experts, 2 * model.ffn, model.hidden), (experts, model.hidden, model.ffn)


def _divided_experts(graph: Graph, model: ModelSpec, x: Value) -> Value:
    """Record a mixture of experts of which each device of a group has some.

    Tokens travel to the devices that have their experts, and back. A device gets as many as it
    sends, times the division's `routing`: the share of the device that gets the most.
    """
    assert model.experts is not None
    assert model.experts_per_token is not None
    division, chosen = graph.division, model.experts_per_token
    got = chosen * division.routing
    scores = graph.linear(x, "mlp.router", model.experts)
    probabilities = graph.pointwise(graph.cast(scores, FP32), save_output=True)
    weights = _chosen_weights(graph, probabilities, chosen)
    start = len(graph.ops)
    sent = graph.pointwise(x, output=graph.value(chosen * model.hidden), saves=(_order(chosen),))
    rows = Exchange("expert", "all-to-all", sent.bytes)
    received = graph.exchange(
        sent, got * model.hidden, (expert_counts(model.experts), rows), (rows,)
    )
    ordered = graph.pointwise(received, saves=(_order(got),))
    own = model.experts // division.expert
    up, narrow = _expert_matrices(model, own)
    joined = graph.stacked(ordered, "mlp.experts.gate_up", up, got, expert=True)
    product = _gated(graph, model, *graph.halves(joined), copies=got)
    down = graph.stacked(product, "mlp.experts.down", narrow, got, expert=True)
    weighted = graph.pointwise(down)  # by 1
    arrived = graph.pointwise(weighted, saves=(_order(got),))
    down = graph.pointwise(arrived)  # summed over one expert
    graph.hold(received, ordered)
    back = graph.exchange(down, chosen * model.hidden, (rows,), (rows,))
    back = graph.pointwise(back, saves=(_order(chosen),))
    graph.hold(x)
    graph.divided = (start, len(graph.ops))
    weighted = graph.pointwise(back, weights, saves=(back, weights))
    return graph.pointwise(weighted, output=graph.value(model.hidden))


def _dropout(graph: Graph, model: ModelSpec, x: Value) -> Value:
    if model.dropout == 0:
        return x
    return graph.pointwise(x, saves=(Value(x.width, 1),))
