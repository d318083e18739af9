"""How a few measured steps correct a prediction and narrow its error interval.

The error of a run has two parts: one that all runs of a stack on a device share, with standard
deviation b, and one of each run, with standard deviation w. Both deviations were measured on stacks
left out of the fit. The mean error of n measured steps is attributed to the stack with the weight
n b² / (n b² + w²). The variance of the next run is then w² plus b² w² / (n b² + w²).
"""

from __future__ import annotations

import math

from shardwise.spec.catalogue import figure
from shardwise.spec.level import Level


def correction_factor(level: Level) -> float:
    """The factor by which predicted seconds are multiplied, from the measured steps of a level."""
    between, within = _deviations(level.regime)
    weight = level.steps * between**2 / (level.steps * between**2 + within**2)
    return float(level.factor**weight)


def narrowing_factor(regime: str, steps: int) -> float:
    """Width of the error interval after `steps` measured steps, relative to the width before."""
    between, within = _deviations(regime)
    left = between**2 * within**2 / (steps * between**2 + within**2)
    return math.sqrt((within**2 + left) / (within**2 + between**2))


def _deviations(regime: str) -> tuple[float, float]:
    """Standard deviations of log errors: between stacks, and between runs of one stack."""
    # With a deviation of zero, a single step would be trusted fully, or not at all.
    least = figure("least_deviation")
    return max(least, figure(f"between-{regime}")), max(least, figure(f"within-{regime}"))
