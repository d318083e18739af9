"""Time a piece of work: warm up, repeat, and mark outliers."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwise.pytorch.device import synchronize

# Called before each measurement with its kind and, if there are several, its size.
Step = Callable[..., None]

WARM_UP = 2
# The least and the most repetitions.
LEAST, MOST = 5, 40
# Seconds that all repetitions together should take.
ENOUGH_S = 0.25
# An outlier is farther from the median than this many median distances.
_FAR = 6.0


class Timing(NamedTuple):
    """Seconds of every repetition, sorted."""

    seconds: tuple[float, ...]

    @staticmethod
    def of(seconds: Sequence[float]) -> Timing:
        return Timing(tuple(sorted(seconds)))

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def usual(self) -> list[float]:
        """Seconds of the repetitions that are not outliers."""
        middle = self.median_s
        distance = statistics.median(abs(one - middle) for one in self.seconds)
        far = _FAR * max(distance, 0.01 * middle)
        return [one for one in self.seconds if abs(one - middle) <= far]

    @property
    def outliers(self) -> int:
        """The number of repetitions that are outliers."""
        return len(self.seconds) - len(self.usual)

    @property
    def spread(self) -> float:
        """The 90th percentile over the 10th, without outliers."""
        usual = self.usual
        last = len(usual) - 1
        return usual[round(0.9 * last)] / usual[round(0.1 * last)]

    def summary(self) -> dict[str, float]:
        last = len(self.seconds) - 1
        return {
            "median_s": self.median_s,
            "p10_s": self.seconds[round(0.1 * last)],
            "p90_s": self.seconds[round(0.9 * last)],
            "repetitions": len(self.seconds),
            "outliers": self.outliers,
        }


def timed(work: Callable[[], object], device: torch.device, inner: int = 1) -> Timing:
    """Seconds per call of `work`, repeated in all processes at once.

    A repetition makes `inner` calls, for work that is too short for a clock. Processes begin each
    repetition together, and make the same number of them, since the work may be a collective. The
    slowest process counts.
    """
    several = dist.is_initialized() and dist.get_world_size() > 1

    def once() -> float:
        """Seconds per call of one repetition."""
        synchronize(device)
        if several:
            dist.barrier()
        begin = time.perf_counter()
        for _ in range(inner):
            work()
        synchronize(device)
        return (time.perf_counter() - begin) / inner

    def slowest(seconds: list[float]) -> list[float]:
        """Seconds of the slowest process for each repetition."""
        if not several:
            return seconds
        told = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        found: list[float] = told.tolist()
        return found

    [first] = slowest([min(once() for _ in range(WARM_UP))])
    count = min(MOST, max(LEAST, int(ENOUGH_S / max(first * inner, 1e-9))))
    return Timing.of(slowest([once() for _ in range(count)]))
