"""Linear layers whose matrix products run in fewer bits than the rest of a model.

Inputs are cast before each product and saved for the backward in their original dtype. Master
weights, gradients, the head and attention keep their dtype.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.spec.dtype import LinearDType
from shardwise.units.stage import Stage
from shardwise.units.unit import ModelUnits, Parameter, Unit


def in_low_bits(units: ModelUnits, dtype: LinearDType, *, gathered: bool) -> ModelUnits:
    """The model with matrix products of its blocks' linear layers in `dtype`.

    With `gathered`, the weights are also all-gathered in low bits.
    """
    made = {block: _block(block, dtype, gathered) for block in dict.fromkeys(units.blocks)}
    return replace(units, blocks=tuple(made[block] for block in units.blocks))


def _block(block: Unit, dtype: LinearDType, gathered: bool) -> Unit:
    return replace(
        block,
        stage=_stage(block.stage, dtype),
        parameters=tuple(_parameter(one, gathered) for one in block.parameters),
        members=tuple(_block(member, dtype, gathered) for member in block.members),
    )


def _stage(stage: Stage, dtype: LinearDType) -> Stage:
    """The stage and its parts with matrix products in `dtype`."""
    parts = tuple(_stage(part, dtype) for part in stage.parts)
    return replace(stage, linear_dtype=dtype, parts=parts)


def _parameter(parameter: Parameter, gathered: bool) -> Parameter:
    """The parameter, marked as gathered in low bits if it is a matrix and `gathered` is set.

    Weights of linear layers are matrices; those of stacked experts have three dimensions.
    """
    cast = gathered and len(parameter.shape) == 2
    return parameter._replace(in_low_bits=cast or parameter.in_low_bits)
