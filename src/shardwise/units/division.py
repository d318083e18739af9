"""Tensor, context and expert parallelism: how devices divide a model and its sequences.

Tensor parallelism divides matrices: attention heads, the width of the MLP, the vocabulary. With
sequence parallelism, activations between matrices are divided along the sequence. Context
parallelism divides sequences: attention then exchanges tokens for heads (Ulysses), or passes keys
and values around (ring). Expert parallelism divides the experts of a mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from shardwise.spec.families import DIVISIBLE
from shardwise.spec.mesh import InnerAxis
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import ContextMethod, Strategy

Operation = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]


class Division(NamedTuple):
    """Degrees of tensor, context and expert parallelism, and how each is done."""

    tensor: int = 1
    # Sequence parallelism: activations between matrices are divided along the sequence.
    sequence: bool = True
    context: int = 1
    method: ContextMethod = "ulysses"
    expert: int = 1
    # Tokens of the device of an expert group that gets the most, relative to the mean.
    routing: float = 1.0

    @classmethod
    def of(cls, strategy: Strategy, routing: float = 1.0) -> Division:
        """The division of a strategy; settings without effect take their default values."""
        return cls(
            strategy.tensor,
            strategy.sequence_parallel or strategy.tensor == 1,
            strategy.context,
            strategy.context_method if strategy.context > 1 else "ulysses",
            strategy.expert,
            routing if strategy.expert > 1 else 1.0,
        )

    @property
    def of_parameters(self) -> bool:
        """Whether a device computes with a part of the parameters only."""
        return max(self.tensor, self.expert) > 1

    @property
    def between(self) -> int:
        """Number of devices of a tensor group that divide activations between matrices."""
        return self.tensor if self.sequence else 1

    def check(self, model: ModelSpec, seq_len: int) -> None:
        """Raise SpecError if a model cannot be divided in this way at this sequence length."""
        problems = problems_of_division(model, self, seq_len)
        if problems:
            raise SpecError(problems)


UNDIVIDED = Division()


class Exchange(NamedTuple):
    """Collectives of one kind; `bytes` is the full group's message per token, over all `calls`."""

    axis: InnerAxis
    op: Operation
    bytes: float
    # Gradient elements, in the gradients' dtype; they do not grow with the tokens.
    elements: int = 0
    calls: int = 1
    # Bytes that do not grow with the tokens.
    fixed: int = 0
    # Whether the host reads the result: it issues nothing more until then.
    host: bool = False


class Exchanges(NamedTuple):
    """Collectives inside a unit, by the pass in which they run."""

    forward: tuple[Exchange, ...] = ()
    backward: tuple[Exchange, ...] = ()
    # Collectives of the forward that recomputation repeats.
    again: tuple[Exchange, ...] = ()
    # Collectives of gradients, which run when gradients are reduced.
    reduced: tuple[Exchange, ...] = ()

    def __bool__(self) -> bool:
        return any(self)


NO_EXCHANGES = Exchanges()


def expert_counts(experts: int) -> Exchange:
    """The exchange of how many tokens each expert gets, 8 bytes each; the host reads them."""
    return Exchange("expert", "all-to-all", 0.0, fixed=8 * experts, host=True)


def join_exchanges(exchanges: Sequence[Exchange]) -> tuple[Exchange, ...]:
    """Sum exchanges with the same axis and operation into one each; those the host reads apart."""
    found: dict[tuple[object, ...], Exchange] = {}
    for one in exchanges:
        key = (one.axis, one.op, one.host)
        before = found.get(key, one._replace(bytes=0.0, elements=0, calls=0, fixed=0))
        found[key] = before._replace(
            bytes=before.bytes + one.bytes,
            elements=before.elements + one.elements,
            calls=before.calls + one.calls,
            fixed=before.fixed + one.fixed,
        )
    return tuple(found.values())


def problems_of_division(model: ModelSpec, division: Division, seq_len: int) -> list[str]:
    """Reasons why a model cannot be divided in this way, one sentence each; empty if it can."""
    tensor, context = division.tensor, division.context
    problems = _problems_of_experts(model, division.expert)
    if max(tensor, context) > 1 and model.experts is not None:
        return ["strategy: mixtures of experts are trained without tensor and context parallelism"]
    if max(tensor, context) > 1 and model.adapter is not None:
        problems.append("strategy: adapters are trained without tensor and context parallelism")
    if tensor > 1:
        if model.family not in DIVISIBLE:
            known = ", ".join(sorted(DIVISIBLE))
            problems.append(
                f"strategy.tensor: models of family {model.family} are not divided; "
                f"those of {known} are"
            )
        for name, count in (("attention heads", model.heads), ("key-value heads", model.kv_heads)):
            if count % tensor:
                problems.append(
                    f"strategy.tensor: {tensor} does not divide the {count} {name} of "
                    f"{model.name}; choose a degree that does"
                )
        if division.sequence and seq_len % (tensor * context):
            problems.append(
                f"strategy.tensor: {tensor} does not divide a sequence of "
                f"{seq_len // context} tokens; choose another job.seq_len"
            )
    if context > 1:
        problems += _problems_of_context(model, division, seq_len)
    return problems


def _problems_of_experts(model: ModelSpec, expert: int) -> list[str]:
    """Reasons why expert parallelism cannot divide the experts of a model."""
    if expert == 1:
        return []
    if model.experts is None:
        return [f"strategy.expert: {model.name} has no experts to divide; set it to 1"]
    if model.experts % expert:
        return [
            f"strategy.expert: {expert} does not divide the {model.experts} experts of "
            f"{model.name}; choose a degree that does"
        ]
    if model.adapter is not None and model.adapter.quantises_experts:
        return [stored_experts_problem(model.adapter.base)]
    return []


def stored_experts_problem(base: str) -> str:
    """Why experts that a base stores quantised are not divided, in a sentence."""
    return (
        f"strategy.expert: experts stored in {base} are not divided among devices; set it to 1, or "
        "adapter.quantised_experts = false"
    )


def _problems_of_context(model: ModelSpec, division: Division, seq_len: int) -> list[str]:
    """Reasons why context parallelism cannot divide a model or its sequences."""
    tensor, context = division.tensor, division.context
    problems = []
    if model.positions == "alibi":
        problems.append(
            f"strategy.context: {model.name} has ALiBi positions, which are not divided"
        )
    if seq_len % context:
        problems.append(
            f"strategy.context: {context} does not divide a sequence of {seq_len} tokens; "
            "choose another job.seq_len"
        )
    heads = model.heads // tensor
    if division.method == "ulysses" and heads % context:
        problems.append(
            f"strategy.context: {context} does not divide the {heads} attention heads of a device; "
            'choose a degree that does, or context_method = "ring"'
        )
    return problems
