"""Seconds of each step, without making the host wait for the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch


class StepClock:
    """Marks the ends of steps; the times between marks are read when someone asks for them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        if not self._cuda:
            self._marks.append(time.perf_counter())
            return
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def take(self) -> list[float]:
        """Seconds of the steps since the last call; the last mark begins the next step."""
        marks, self._marks = self._marks, self._marks[-1:]
        if not self._cuda:
            return [after - before for before, after in pairwise(marks)]
        if marks:
            marks[-1].synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(marks)]

    def restart(self) -> None:
        """Forget what was marked: the time until the next mark belongs to no step."""
        self._marks = []
        self.mark()


def quantile(values: Sequence[float], share: float) -> float:
    """A value of the sample: the one below which `share` of it lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
