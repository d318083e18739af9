"""Measure the seconds of each step without making the host wait for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.engine.device import clock_of, seconds_between


class StepClock:
    """Marks the ends of steps; `take` reads their times."""

    def __init__(self, device: torch.device) -> None:
        self._now = clock_of(device)
        self._steps: list[tuple[Any, Any]] = []
        self._begin = self._now()

    def mark(self) -> None:
        """End a step and begin the next one."""
        end = self._now()
        self._steps.append((self._begin, end))
        self._begin = end

    def skip(self) -> None:
        """Exclude the time since the last step."""
        self._begin = self._now()

    def take(self) -> list[float]:
        """Seconds of the steps since the last call."""
        steps, self._steps = self._steps, []
        return seconds_between(steps)


def quantile(values: Sequence[float], share: float) -> float:
    """The value of the sample below which `share` of it lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
