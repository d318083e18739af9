"""Expert parallelism of a traced model: its stacked experts divided among devices.

A trace knows the FLOPs of grouped products, to how many experts a token is sent, and the shapes of
parameters, but not at which operation of a block its experts begin. So a block is seen in two
parts, the experts and the rest, and memory of either may occur during both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from shardwise.spec.record import SpecError
from shardwise.units.division import (
    Division,
    Exchange,
    Exchanges,
    expert_counts,
    stored_experts_problem,
)
from shardwise.units.stage import POLICIES, Kept, Moment, Policy, Stage
from shardwise.units.unit import ModelUnits, Parameter, Unit


def divide_experts(units: ModelUnits, division: Division) -> ModelUnits:
    """The units of one device of an expert group.

    Raises:
        SpecError: The model has no stacked experts, or the degree does not divide them.
    """
    made = {block: _divided(block, units, division) for block in dict.fromkeys(units.blocks)}
    if all(len(block.groups) == 1 for block in made.values()):
        raise SpecError(
            f"strategy.expert: {units.name} has no stacked experts to divide; set it to 1"
        )
    blocks = tuple(made[block] for block in units.blocks)
    return replace(units, blocks=blocks, division=division, whole_numel=units.parameters)


def _divided(block: Unit, units: ModelUnits, division: Division) -> Unit:
    """A block with its part of the experts; unchanged if it has none."""
    count = block.stage.experts
    stacked = _stacked(block.parameters, count)
    if not stacked:
        return block
    if count % division.expert:
        raise SpecError(
            f"strategy.expert: {division.expert} does not divide the {count} experts of "
            f"{units.name}; choose a degree that does"
        )
    if any(p.quantised is not None for p in stacked):
        raise SpecError(stored_experts_problem("4 or 8 bits"))
    own = count // division.expert
    parameters = tuple(
        p._replace(shape=(own, *p.shape[1:]), expert=True) if p in stacked else p
        for p in block.parameters
    )
    trained = float(sum(p.numel for p in stacked if p.trainable))
    stage = block.stage
    parts = (
        _shared_part(stage, trained),
        _experts_part(stage, trained, units.boundary_bytes, division),
    )
    return replace(block, parameters=parameters, stage=replace(stage, parts=parts))


def _stacked(parameters: Sequence[Parameter], count: int) -> tuple[Parameter, ...]:
    """The parameters that hold all `count` experts: matrices, and the biases beside them."""
    holders = {
        p.name.rpartition(".")[0] for p in parameters if len(p.shape) == 3 and p.shape[0] == count
    }
    return tuple(
        p for p in parameters if p.shape[:1] == (count,) and p.name.rpartition(".")[0] in holders
    )


def _shared_part(stage: Stage, trained: float) -> Stage:
    """What a block computes besides its experts, whose `trained` gradients come before it."""
    later = _after_experts(stage, trained)
    return replace(
        stage,
        matmul_flops=stage.matmul_flops - stage.grouped_flops,
        gradient_flops=stage.backward_matmul_flops - _gradient_flops(stage, trained),
        grouped_flops=0.0,
        routed=0.0,
        experts=0,
        kept={policy: _recomputed(stage, policy) for policy in POLICIES},
        backward=_with_gradients(later, -trained),
    )


def _after_experts(stage: Stage, trained: float) -> list[Moment]:
    """The moments of the backward after the experts', whose gradients are `trained` elements."""
    return [m for m in stage.backward if m.gradient_elements > trained] or [*stage.backward]


def _experts_part(stage: Stage, trained: float, width_bytes: float, division: Division) -> Stage:
    """The experts of a block: tokens travel to them, `width_bytes` each, and back."""
    rows = Exchange("expert", "all-to-all", 2.0 * stage.routed * width_bytes, calls=2)
    more = division.routing
    forward = (expert_counts(stage.experts), rows)
    early = [m for m in stage.backward if m.gradient_elements <= trained] or [*stage.backward]
    return Stage(
        matmul_flops=more * stage.grouped_flops,
        gradient_flops=more * _gradient_flops(stage, trained),
        grouped_flops=more * stage.grouped_flops,
        routed=more * stage.routed,
        experts=stage.experts // division.expert,
        products=2,
        product_width=stage.product_width,
        compiled=stage.compiled,
        kept={policy: _recomputed(stage, policy, more) for policy in POLICIES},
        forward=stage.forward,
        forward_unsaved=stage.forward_unsaved,
        backward=tuple(
            m._replace(gradient_elements=min(m.gradient_elements, trained) / division.expert)
            for m in early
        ),
        exchanges=Exchanges(forward=forward, backward=(rows,), again=forward),
        of_experts=True,
        after_bytes=max(m.activation_bytes for m in _after_experts(stage, trained)),
    )


def _gradient_flops(stage: Stage, trained: float) -> float:
    """FLOPs of the backward of the experts: for their inputs, and for their weights if trained."""
    return (2.0 if trained else 1.0) * stage.grouped_flops


def _recomputed(stage: Stage, policy: Policy, share: float = 0.0) -> Kept:
    """What a policy keeps of the block, and the FLOPs that it repeats in one of its parts.

    With a `share`, that of the experts, times it; else the rest.
    """
    kept = stage.kept[policy]
    grouped = min(stage.grouped_flops, kept.recomputed_matmul_flops)
    if share:
        return kept._replace(
            recomputed_matmul_flops=share * grouped, recomputed_attention_flops=0.0
        )
    return kept._replace(recomputed_matmul_flops=kept.recomputed_matmul_flops - grouped)


def _with_gradients(moments: Sequence[Moment], more: float) -> tuple[Moment, ...]:
    """The moments with so many more gradient elements, at least 0."""
    return tuple(
        m._replace(gradient_elements=max(0.0, m.gradient_elements + more)) for m in moments
    )
