"""How far a few measured steps move a prediction, and how much narrower its interval is then.

Errors of runs have a part that is of the stack and its device, and one of each run: their standard
deviations follow from stacks left out of the fit. So the mean error of n steps is that of the stack
by n b² / (n b² + w²), and what stays unknown of the next run is w² and what n steps leave of b².
"""

from __future__ import annotations

import math

from shardwise.spec.catalogue import figure
from shardwise.spec.level import Level


def correction(level: Level) -> float:
    """The factor on predicted seconds."""
    between, within = _deviations(level.regime)
    weight = level.steps * between**2 / (level.steps * between**2 + within**2)
    return float(level.factor**weight)


def narrowing(regime: str, steps: int) -> float:
    """The width of an interval after so many measured steps, relative to before."""
    between, within = _deviations(regime)
    left = between**2 * within**2 / (steps * between**2 + within**2)
    return math.sqrt((within**2 + left) / (within**2 + between**2))


def _deviations(regime: str) -> tuple[float, float]:
    """Of stacks on a device, and of their runs."""
    # A deviation of nothing would trust one step, or none, without end.
    least = figure("least_deviation")
    return max(least, figure(f"between-{regime}")), max(least, figure(f"within-{regime}"))
