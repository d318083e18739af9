"""A list of tensor operations, with the tensors that autograd saves for each.

Parameters, FLOPs, bytes saved under each recompute policy, and memory during the backward are
computed from this list.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwise.spec.adapter import Adapter
from shardwise.units.division import WHOLE, Division, Exchange, Exchanges, together
from shardwise.units.stage import POLICIES, Kept, Moment, Policy, Stage, mean_width, prune
from shardwise.units.unit import DEQUANTISING_BYTES, Parameter, frozen


@dataclass(eq=False, repr=False)
class Value:
    """A tensor, in bytes per token. Views of one storage are one Value."""

    width: float
    itemsize: int
    logits: bool = False
    # Whether a gradient is needed: something this tensor was computed from is trained.
    needs: bool = True

    @property
    def bytes(self) -> float:
        return self.width * self.itemsize


@dataclass(eq=False, repr=False)
class Op:
    """One operation. `saves` are the tensors autograd holds for its backward."""

    output: Value
    inputs: tuple[Value, ...]
    saves: tuple[Value, ...] = ()
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
    # Name of the matrix that the operation reads, if that matrix can be quantised.
    quantised: str | None = None
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
    division: Division = WHOLE
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

    def _run(self, op: Op) -> Value:
        """Append an operation and return its output; saves nothing if no gradient is needed."""
        op.output.needs = any(x.needs for x in op.inputs) or op.parameter_elements > 0
        if not op.output.needs:
            op.saves = ()
        self.ops.append(op)
        return op.output

    def value(self, width: float, itemsize: int | None = None, logits: bool = False) -> Value:
        """A new tensor of `width` elements per token, by default in the compute dtype."""
        return Value(width, self.itemsize if itemsize is None else itemsize, logits)

    def parameter(self, name: str, *shape: int, matrix: bool = False) -> int:
        """Record a parameter of the model; returns the elements of its gradient, 0 if frozen.

        `matrix` marks the weight of a linear layer in a block, which can be quantised.
        """
        if self.adapter is None:
            parameter = Parameter(name=name, shape=shape)
        else:
            parameter = frozen(Parameter(name=name, shape=shape), self.adapter, matrix)
        self.parameters.append(parameter)
        return parameter.numel if parameter.trainable else 0

    def _added(self, name: str, *shape: int) -> int:
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

    def _adapted(self, adapter: Adapter, x: Value, product: Value, name: str) -> Value:
        """Record LoRA of a linear layer: its input times two narrow matrices, scaled and added."""
        assert adapter.rank is not None
        width, out, rank = round(x.width), round(product.width), adapter.rank
        if adapter.dropout:
            # The mask has a byte per element; the input after dropout is a new tensor.
            x = self.pointwise(x, saves=(Value(x.width, 1),))
        first = self._added(f"{name}.lora_A.weight", rank, width)
        second = self._added(f"{name}.lora_B.weight", out, rank)
        narrow = self.matmul(x, rank, first, 2.0 * width * rank)
        wide = self.matmul(narrow, out, second, 2.0 * rank * out)
        if adapter.dora:
            magnitude = self._added(f"{name}.lora_magnitude_vector.weight", out)
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

    # ---- results ----------------------------------------------------------------------------

    def stage(self, compiled: bool = False) -> Stage:
        """The Stage of these operations: FLOPs, bytes, and memory of forward and backward."""
        saves = self._saved_values(compiled)
        moments = self._backward(saves)
        return Stage(
            matmul_flops=sum(op.matmul_flops for op in self.ops),
            attention_flops=sum(op.attention_flops for op in self.ops),
            attention_span=max((op.attention_span for op in self.ops), default=0),
            head_dim=min((op.head_dim for op in self.ops if op.head_dim), default=128),
            elementwise_bytes=self._moved(),
            fused_bytes=self._moved_fused() if compiled else 0.0,
            kernels=len(self.ops),
            products=sum(op.matmul_flops > 0 for op in self.ops),
            product_width=mean_width(
                (op.matmul_flops, op.output.width / (op.routed or 1.0)) for op in self.ops
            ),
            grouped_flops=sum(op.matmul_flops for op in self.ops if op.routed),
            routed=max((op.routed for op in self.ops), default=0.0),
            experts=self.experts,
            logits=sum(
                op.output.width for op in self.ops if op.matmul_flops > 0 and op.output.logits
            ),
            logit_moved=self._moved(logits=True),
            compiled=compiled,
            gradient_flops=sum(op.gradient_flops for op in self.ops),
            kept={policy: self._kept(policy, saves) for policy in POLICIES},
            forward=self._forward(saves),
            forward_unsaved=self._forward([() for _ in self.ops]),
            backward=prune(moments),
            exchanges=self._exchanges(),
        )

    def _moved(self, *, logits: bool = False) -> float:
        """Bytes per token that a forward's element-wise operations read and write, one by one.

        With `logits`, only of those that read logits.
        """
        pointwise = [op for op in self.ops if op.pointwise]
        if logits:
            pointwise = [op for op in pointwise if any(x.logits for x in op.inputs)]
        return sum(op.output.bytes + sum(x.bytes for x in op.inputs) for op in pointwise)

    def _moved_fused(self) -> float:
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
        for op in self.ops:
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
        return sum(self._passed(set(ops)) for ops in members)

    def _passed(self, ops: set[Op]) -> float:
        """Bytes per token that one kernel of these operations reads and writes."""
        made = {op.output for op in ops}
        read = {x for op in ops for x in op.inputs} - made
        outside = [op for op in self.ops if op not in ops]
        needed = {x for op in outside for x in op.inputs} | {self.ops[-1].output}
        return sum(value.bytes for value in read | (made & needed))

    def _exchanges(self) -> Exchanges:
        """All collectives of the recorded operations, by the pass in which they run."""
        stop = self._recompute_stop()
        return Exchanges(
            forward=together([one for op in self.ops for one in op.sent]),
            backward=together([one for op in reversed(self.ops) for one in op.returned]),
            again=together([one for op in self.ops[: max(0, stop)] for one in op.sent]),
            reduced=together(self.reduced),
        )

    def _saved_values(self, compiled: bool) -> list[tuple[Value, ...]]:
        """The values saved for the backward, for each operation."""
        if not compiled:
            return [op.saves for op in self.ops]
        # A compiler recomputes element-wise results in the backward from their inputs, unless a
        # matmul or attention needs them there.
        made_by = {op.output: op for op in self.ops if op.pointwise}

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
            for op in self.ops
        ]

    def _kept(self, policy: Policy, saves: list[tuple[Value, ...]]) -> Kept:
        """Bytes saved and FLOPs recomputed per token under a recompute policy."""
        saved = _unique(saves)
        if policy == "none":
            return Kept(activation_bytes=_bytes(saved, False), logit_bytes=_bytes(saved, True))
        stop = self._recompute_stop()
        again = [op for index, op in enumerate(self.ops) if index < stop]
        if policy == "full":
            kept = [self.input]
        else:
            chosen = self._saved_by_selective()
            kept = [self.input]
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

    def _saved_by_selective(self) -> list[Op]:
        """Operations whose outputs selective recompute saves: attention and every other matmul.

        Grouped products of all experts are not among the operations that torch then saves.
        """
        matmuls = [op for op in self.ops if op.matmul_flops > 0 and not op.routed]
        return [op for op in self.ops if op.attention_flops > 0] + matmuls[::2]

    def _recompute_stop(self) -> int:
        """Index of the first operation that recomputation does not run.

        torch stops as soon as the last saved tensor exists. Inputs are saved before a kernel
        runs, so the last matmul of a block, which saves its input only, is not recomputed.
        """
        last = max((i for i, op in enumerate(self.ops) if op.saves), default=-1)
        return last + 1 if last >= 0 and self.ops[last].saves_own_output else last

    def _forward(self, saves: list[tuple[Value, ...]]) -> tuple[Moment, ...]:
        """Memory during each operation of the forward, if it saves `saves`; the possible peaks."""
        last_use: dict[Value, int] = {}
        for index, op in enumerate(self.ops):
            for x in (*op.inputs, op.output):
                last_use[x] = index
        held: dict[Value, None] = {self.input: None}
        moments: list[Moment] = []
        transient: dict[Value, None] = {}
        made: dict[Value, None] = {}
        for index, op in enumerate(self.ops):
            held |= dict.fromkeys(saves[index])
            if op.quantised:
                moments.append(_moment({**held, **transient}, 0.0, op, DEQUANTISING_BYTES))
            transient[op.output] = None
            named = [v for v in self.named if v in transient or v in made]
            made[op.output] = None
            live = {**held, **transient, **dict.fromkeys(named)}
            moments.append(_moment(live, 0.0, op, float(self.itemsize), op.scratch))
            transient = {v: None for v in transient if last_use[v] > index}
        return prune(moments)

    def _backward(self, saves: list[tuple[Value, ...]]) -> list[Moment]:
        """Memory during each operation of the backward, after which its saved values are freed."""
        readers: dict[Value, int] = {}
        for saved in saves:
            for value in saved:
                readers[value] = readers.get(value, 0) + 1
        held = dict.fromkeys(readers)
        gradients: dict[Value, Value] = {self.ops[-1].output: self.ops[-1].output}
        made_elements = 0.0
        moments: list[Moment] = []
        for op, saved in zip(reversed(self.ops), reversed(saves), strict=True):
            outgoing = gradients.pop(op.output, None)
            if outgoing is None:
                continue
            if op.quantised:
                live = [*held, *dict.fromkeys((outgoing, *gradients.values()))]
                moments.append(_moment(live, made_elements, op, DEQUANTISING_BYTES))
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
            live = [*held, *dict.fromkeys((outgoing, *gradients.values(), *fresh))]
            scratch = op.backward_scratch
            moments.append(_moment(live, made_elements, op, float(self.itemsize), scratch))
            for value in saved:
                readers[value] -= 1
                if readers[value] == 0:
                    del held[value]
        return moments


def _unique(saves: Sequence[tuple[Value, ...]]) -> list[Value]:
    """All saved values, each once."""
    return list(dict.fromkeys(value for saved in saves for value in saved))


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
