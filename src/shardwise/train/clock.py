"""Seconds of each step, without making the host wait for the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch


class StepClock:
    """Marks the ends of steps; their times are read when someone asks for them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._steps: list[tuple[Any, Any]] = []
        self._begin = self._now()

    def mark(self) -> None:
        """A step has ended, and the next one begins."""
        end = self._now()
        self._steps.append((self._begin, end))
        self._begin = end

    def skip(self) -> None:
        """The time until here belongs to no step."""
        self._begin = self._now()

    def take(self) -> list[float]:
        """Seconds of the steps since the last call."""
        steps, self._steps = self._steps, []
        if not self._cuda:
            return [end - begin for begin, end in steps]
        if steps:
            steps[-1][1].synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in steps]

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def quantile(values: Sequence[float], share: float) -> float:
    """A value of the sample: the one below which `share` of it lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
