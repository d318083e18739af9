"""A list of tensor operations, with the tensors that autograd saves for each.

`graph_stage.py` computes FLOPs, saved bytes and the memory of both passes from this list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.spec.adapter import Adapter
from shardwise.units.division import UNDIVIDED, Division, Exchange
from shardwise.units.unit import DEQUANTISING_BYTES, Parameter, dequantising_bytes, frozen

# Bytes of an element in fp32, and of an integer.
FP32, INT64 = 4, 8


@dataclass(eq=False, repr=False)
class Value:
    """A tensor, in bytes per token. Views of all of a storage are one Value."""

    width: float
    itemsize: int
    logits: bool = False
    # Whether a gradient is needed: something this tensor was computed from is trained.
    needs: bool = True
    # Of a view of a part: the tensor whose storage it keeps alive. Its gradient is a tensor apart.
    base: Value | None = None

    @property
    def bytes(self) -> float:
        return self.width * self.itemsize

    @property
    def storage(self) -> Value:
        """The tensor that holds the data: this one, or what it is a view of."""
        return self.base or self


@dataclass(eq=False, repr=False)
class Op:
    """One operation. `saves` are the tensors autograd holds for its backward."""

    output: Value
    inputs: tuple[Value, ...]
    saves: tuple[Value, ...] = ()
    # Further outputs: views of the other parts of the input.
    others: tuple[Value, ...] = ()
    # Tensors that variables in the code keep alive until the operation has run.
    holds: tuple[Value, ...] = ()
    # Elements of the trained parameters that the operation reads.
    parameter_elements: int = 0
    matmul_flops: float = 0.0
    # Rows per token of a grouped product of all experts; 0 for others.
    routed: float = 0.0
    attention_flops: float = 0.0
    attention_span: int = 0
    head_dim: int = 0
    # Whether the output's gradient is passed unchanged to the inputs.
    alias: bool = False
    # Element-wise: a compiler can fuse it, and recompute it instead of saving its output.
    pointwise: bool = False
    # One kernel whose backward allocates no full-size temporary.
    fused: bool = False
    # Name of the matrix that the operation reads, if that matrix can be quantised, and bytes per
    # element while it is dequantised.
    quantised: str | None = None
    dequantising: float = DEQUANTISING_BYTES
    # Collectives of its forward and of its backward.
    sent: tuple[Exchange, ...] = ()
    returned: tuple[Exchange, ...] = ()
    # Bytes of temporaries while its forward and its backward run.
    scratch: float = 0.0
    backward_scratch: float = 0.0

    @property
    def saves_own_output(self) -> bool:
        """Whether the operation saves anything else than its inputs."""
        return any(saved not in self.inputs for saved in self.saves)

    @property
    def gradient_flops(self) -> float:
        """Matmul FLOPs of the backward: one product for each gradient needed, input and weights."""
        products = any(x.needs for x in self.inputs) + (self.parameter_elements > 0)
        return products * self.matmul_flops

    @property
    def reduces_in_backward(self) -> bool:
        """Whether the backward reduces a full-width temporary to a narrower gradient."""
        narrow = any(x.width < self.output.width for x in self.inputs)
        return self.pointwise and not self.fused and (narrow or self.parameter_elements > 0)


@dataclass
class Graph:
    """Operations in execution order, recorded by calling the methods below."""

    # Bytes per element in matmuls and attention. Under autocast the residual stream, parameters
    # and norms keep their own dtype, and each matmul casts its input.
    itemsize: int
    input: Value
    # Decides what is trained; None trains everything.
    adapter: Adapter | None = None
    division: Division = UNDIVIDED
    # Names of linear layers in transformers, by the names used here.
    linear_names: Mapping[str, str] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    parameters: list[Parameter] = field(default_factory=list)
    # Values that variables in the model's code keep alive until its forward returns.
    named: list[Value] = field(default_factory=list)
    experts: int = 0
    # Whether attention keeps its scores, as eager attention does.
    eager: bool = False
    # Collectives of gradients.
    reduced: list[Exchange] = field(default_factory=list)
    # Indices of the first operation of the divided experts and of the first after them: what runs
    # while their parameters are gathered. None if experts are not divided.
    divided: tuple[int, int] | None = None

    def _run(self, op: Op) -> Value:
        """Append an operation and return its output; saves nothing if no gradient is needed."""
        for made in (op.output, *op.others):
            made.needs = any(x.needs for x in op.inputs) or op.parameter_elements > 0
        if not op.output.needs:
            op.saves = ()
        self.ops.append(op)
        return op.output

    def value(self, width: float, itemsize: int | None = None, logits: bool = False) -> Value:
        """A new tensor of `width` elements per token, by default in the compute dtype."""
        return Value(width, self.itemsize if itemsize is None else itemsize, logits)

    def parameter(self, name: str, *shape: int, matrix: bool = False, expert: bool = False) -> int:
        """Record a parameter of the model; returns the elements of its gradient, 0 if frozen.

        `matrix` marks the weight of a linear layer in a block, which can be quantised, `expert`
        those of divided experts.
        """
        parameter = Parameter(name=name, shape=shape, expert=expert)
        if self.adapter is not None:
            parameter = frozen(parameter, self.adapter, matrix)
        self.parameters.append(parameter)
        return parameter.numel if parameter.trainable else 0

    def _adapter_parameter(self, name: str, *shape: int) -> int:
        """Record a parameter of an adapter, which is always trained; returns its elements."""
        parameter = Parameter(name=name, shape=shape)
        self.parameters.append(parameter)
        return parameter.numel

    def linear(
        self,
        x: Value,
        name: str,
        out: int,
        *,
        bias: bool = False,
        transposed: bool = False,
        logits: bool = False,
        tied: bool = False,
    ) -> Value:
        """Record a linear layer with its parameters, and LoRA if it has an adapter.

        A `tied` layer has no weight of its own.
        """
        width = round(x.width)
        shape = (width, out) if transposed else (out, width)
        if tied:
            elements = width * out if self.adapter is None else 0
        else:
            matrix = name in self.linear_names and not transposed
            elements = self.parameter(f"{name}.weight", *shape, matrix=matrix)
        elements += self.parameter(f"{name}.bias", out) if bias else 0
        product = self.matmul(x, out, elements, 2.0 * width * out, logits=logits)
        if not tied and self.adapter is not None and self.adapter.quantised and matrix:
            self.ops[-1].quantised = f"{name}.weight"
        if self.adapter is None or not self.adapter.adapts(self.linear_names.get(name, "lm_head")):
            return product
        return self._adapted(self.adapter, x, product, name)

    def stacked(
        self, x: Value, name: str, shape: tuple[int, int, int], rows: float, *, expert: bool = False
    ) -> Value:
        """Record a grouped product of `rows` rows per token with stacked matrices.

        `shape` is (experts, out, in); `expert` marks those of divided experts.
        """
        elements = self.parameter(name, *shape, matrix=not expert, expert=expert)
        made = self.matmul(x, rows * shape[1], elements, 2.0 * rows * shape[1] * shape[2])
        op = self.ops[-1]
        op.routed, self.experts = rows, shape[0]
        if self.adapter is not None and self.adapter.quantises_experts and not expert:
            op.quantised = name
            op.dequantising = dequantising_bytes(shape, self.itemsize)
        return made

    def _adapted(self, adapter: Adapter, x: Value, product: Value, name: str) -> Value:
        """Record LoRA of a linear layer: its input times two narrow matrices, scaled and added."""
        assert adapter.rank is not None
        width, out, rank = round(x.width), round(product.width), adapter.rank
        if adapter.dropout:
            # The mask has a byte per element; the input after dropout is a new tensor.
            x = self.pointwise(x, saves=(Value(x.width, 1),))
        first = self._adapter_parameter(f"{name}.lora_A.weight", rank, width)
        second = self._adapter_parameter(f"{name}.lora_B.weight", out, rank)
        narrow = self.matmul(x, rank, first, 2.0 * width * rank)
        wide = self.matmul(narrow, out, second, 2.0 * rank * out)
        if adapter.dora:
            magnitude = self._adapter_parameter(f"{name}.lora_magnitude_vector.weight", out)
            wide = self.pointwise(wide, product, saves=(wide,), parameter_elements=magnitude)
        return self.residual(product, self.pointwise(wide))

    def matmul(
        self, x: Value, out: float, elements: int, flops: float, *, logits: bool = False
    ) -> Value:
        """Record a product with `elements` trained weight elements, which saves its input."""
        x = self.cast(x, self.itemsize)
        return self._run(
            Op(
                output=self.value(out, logits=logits),
                inputs=(x,),
                # For the gradient of the weights.
                saves=(x,) if elements else (),
                parameter_elements=elements,
                matmul_flops=flops,
            )
        )

    def cast(self, x: Value, itemsize: int) -> Value:
        """Record a cast; returns the same tensor if the dtype does not change."""
        if x.itemsize == itemsize:
            return x
        output = self.value(x.width, itemsize, x.logits)
        return self._run(Op(output=output, inputs=(x,), pointwise=True))

    def pointwise(
        self,
        *inputs: Value,
        saves: Sequence[Value] = (),
        save_output: bool = False,
        itemsize: int | None = None,
        parameter_elements: int = 0,
        output: Value | None = None,
        fused: bool = False,
    ) -> Value:
        """Record an element-wise operation; by default its output is like its first input."""
        first = inputs[0]
        made = output or self.value(first.width, itemsize or first.itemsize, first.logits)
        saved = (*saves, made) if save_output else tuple(saves)
        return self._run(
            Op(
                output=made,
                inputs=inputs,
                saves=saved,
                parameter_elements=parameter_elements,
                pointwise=True,
                fused=fused,
            )
        )

    def hold(self, *values: Value) -> None:
        """Record that variables in the code keep these tensors alive until the last operation."""
        self.ops[-1].holds = values

    def halves(self, x: Value) -> tuple[Value, Value]:
        """Record the halves of a tensor, which are views; the backward joins their gradients."""
        first, second = (Value(x.width / 2, x.itemsize, x.logits, base=x) for _ in range(2))
        self._run(Op(output=first, inputs=(x,), others=(second,)))
        return first, second

    def residual(self, x: Value, branch: Value) -> Value:
        """Record x + branch; both get the same gradient tensor in the backward."""
        output = self.value(x.width, x.itemsize)
        return self._run(Op(output=output, inputs=(x, branch), alias=True, pointwise=True))

    def attention(
        self,
        q: Value,
        k: Value,
        v: Value,
        *,
        heads: int,
        width: int,
        span: int,
        sent: tuple[Exchange, ...] = (),
        returned: tuple[Exchange, ...] = (),
        scratch: float = 0.0,
    ) -> Value:
        """Record fused attention: it saves no score matrix, but one log-sum-exp per head and token.

        `sent` and `returned` are collectives of its forward and backward, `scratch` the bytes of
        temporaries during both.
        """
        inputs = tuple(self.cast(x, self.itemsize) for x in dict.fromkeys((q, k, v)))
        if self.eager:
            return self._eager(inputs, heads, width, span)
        output = self.value(width)
        statistics = self.value(heads, 4)
        return self._run(
            Op(
                output=output,
                inputs=inputs,
                saves=(*inputs, output, statistics),
                attention_flops=4.0 * span * width,
                attention_span=span,
                head_dim=round(width / heads),
                sent=sent,
                returned=returned,
                scratch=scratch,
                backward_scratch=scratch,
            )
        )

    def _eager(self, inputs: tuple[Value, ...], heads: int, width: int, span: int) -> Value:
        """Record eager attention as transformers runs it: every operation makes its own scores.

        Keys and values are repeated for all heads. Scores are scaled, masked and cast to fp32 for
        the softmax; its output is kept in fp32 and as cast back. Their time is in the kernel's.
        """
        q, *rest = inputs
        repeated = [
            x if x.width >= width else self._run(Op(output=self.value(width), inputs=(x,)))
            for x in rest
        ] or [q]
        k, v = repeated[0], repeated[-1]
        scores = heads * span
        half: dict[str, Any] = {
            "attention_flops": 2.0 * span * width,
            "attention_span": span,
            "head_dim": round(width / heads),
        }
        made = self._run(Op(output=self.value(scores), inputs=(q, k), saves=(q, k), **half))
        for _ in ("scaled", "masked"):
            made = self._run(Op(output=self.value(scores), inputs=(made,)))
        soft = self.value(scores, max(4, self.itemsize))
        self._run(Op(output=soft, inputs=(made,), saves=(soft,)))
        if soft.itemsize != self.itemsize:
            soft = self._run(Op(output=self.value(scores), inputs=(soft,)))
        return self._run(Op(output=self.value(width), inputs=(soft, v), saves=(soft, v), **half))

    def exchange(
        self,
        x: Value,
        width: float,
        sent: tuple[Exchange, ...],
        returned: tuple[Exchange, ...],
        scratch: float = 0.0,
    ) -> Value:
        """Record a collective among the devices that divide this block, and its backward.

        `width` is the output's. `scratch` is bytes of the copy that a collective makes of data that
        is not contiguous. Without `sent` collectives, the output is the input itself.
        """
        output = self.value(width, x.itemsize) if sent else x
        return self._run(
            Op(
                output=output,
                inputs=(x,),
                # Without a collective in the backward, the gradient is passed on unchanged.
                alias=not returned,
                sent=sent,
                returned=returned,
                scratch=scratch if sent else 0.0,
                backward_scratch=scratch if returned else 0.0,
            )
        )

    def norm_statistics(self, per_token: float) -> Value:
        """A new fp32 tensor of `per_token` elements, such as a norm's mean."""
        return self.value(per_token, 4)
