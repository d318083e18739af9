"""The norms of a decoder block, recorded as the operations that PyTorch and transformers run."""

from __future__ import annotations

from shardwise.spec.model import ModelSpec
from shardwise.units.division import Exchange
from shardwise.units.graph import FP32, Graph, Value


def norm(graph: Graph, model: ModelSpec, x: Value, name: str, heads: int | None = None) -> Value:
    """Record the model's kind of norm; with `heads`, a norm of queries or keys."""
    width = model.hidden if heads is None else round(x.width)
    if heads is not None and model.qk_norm == "head":
        width = model.head_dim
    rows = x.width / width
    # A device sees only some of the tokens or heads, so gradients of the weights must be summed.
    divided = graph.division.tensor > 1 and (graph.division.sequence or heads is not None)
    if model.norm == "layernorm":
        return _layernorm(graph, model, x, name, divided)
    elements = 0
    if model.norm_parameters != "none":
        elements = _norm_parameter(graph, f"{name}.weight", width, divided)
    high = graph.cast(x, max(FP32, x.itemsize))
    scale = graph.norm_statistics(rows)
    mean = graph.pointwise(high, saves=(high,), output=graph.norm_statistics(rows))
    graph.pointwise(mean, save_output=True, output=scale)
    normed = graph.pointwise(high, scale, saves=(high, scale))
    if model.norm == "rmsnorm":
        normed = graph.cast(normed, x.itemsize)
        # Weights have the residual stream's dtype; a product with a narrower input has it too.
        return graph.pointwise(
            normed,
            saves=(normed,) if elements else (),
            parameter_elements=elements,
            itemsize=max(x.itemsize, graph.input.itemsize),
        )
    saved = (normed,) if elements else ()
    weighted = graph.pointwise(normed, saves=saved, parameter_elements=elements)
    return graph.cast(weighted, x.itemsize)


def _norm_parameter(graph: Graph, name: str, width: int, divided: bool) -> int:
    """Record a norm's parameter, and return the elements of its gradient.

    With `divided`, a tensor group all-reduces the gradient.
    """
    if divided:
        graph.reduced.append(Exchange("tensor", "all-reduce", 0.0, elements=width))
    return graph.parameter(name, width)


def _layernorm(graph: Graph, model: ModelSpec, x: Value, name: str, divided: bool) -> Value:
    elements, width, rows = 0, model.hidden, x.width / model.hidden
    if model.norm_parameters != "none":
        elements += _norm_parameter(graph, f"{name}.weight", width, divided)
    if model.norm_parameters == "weight+bias":
        elements += _norm_parameter(graph, f"{name}.bias", width, divided)
    # OLMo casts to fp32 first; other families do it inside the kernel.
    bare = model.norm_parameters == "none"
    source = graph.cast(x, max(FP32, x.itemsize)) if bare else x
    mean, scale = graph.norm_statistics(rows), graph.norm_statistics(rows)
    made = graph.pointwise(
        source, saves=(source, mean, scale), parameter_elements=elements, fused=True
    )
    return graph.cast(made, x.itemsize)
