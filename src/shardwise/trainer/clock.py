"""Measure the seconds of each step without making the host wait for the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from shardwise.pytorch.device import clock_of, seconds_between


class StepClock:
    """Records the end of each step; `take` returns the durations of steps in seconds."""

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
        """Leave the time since the last mark out of the next step's duration."""
        self._begin = self._now()

    def take(self) -> list[float]:
        """The duration in seconds of each step that ended since the last call."""
        steps, self._steps = self._steps, []
        return seconds_between(steps)


def quantile(values: Sequence[float], share: float) -> float:
    """The `share` quantile (0 to 1) of `values`, without interpolation."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
