"""How long a piece of work takes: warmed up, repeated, and what lies far from the rest is shown."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardwise.engine.device import synchronize

# Told what is measured next: a kind, and which of them.
Step = Callable[..., None]

WARM_UP = 2
LEAST, MOST = 5, 40
# Repeated until so many seconds have gone by.
ENOUGH_S = 0.25
# Distances from the median, in median distances, beyond which a repetition is an outlier.
_FAR = 6.0


class Timing(NamedTuple):
    """Seconds of every repetition, in the order of their length."""

    seconds: tuple[float, ...]

    @staticmethod
    def of(seconds: Sequence[float]) -> Timing:
        return Timing(tuple(sorted(seconds)))

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def usual(self) -> list[float]:
        """Those that lie with the others."""
        middle = self.median_s
        distance = statistics.median(abs(one - middle) for one in self.seconds)
        far = _FAR * max(distance, 0.01 * middle)
        return [one for one in self.seconds if abs(one - middle) <= far]

    @property
    def outliers(self) -> int:
        return len(self.seconds) - len(self.usual)

    @property
    def spread(self) -> float:
        """The 90th percentile over the 10th; outliers are left out."""
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
    """Of all processes at once, each beginning when all are there; the slowest counts.

    They make the same number of repetitions, since the work may be a collective. `inner` calls
    make one repetition where a single one is too short for a clock.
    """
    several = dist.is_initialized() and dist.get_world_size() > 1

    def once() -> float:
        synchronize(device)
        if several:
            dist.barrier()
        begin = time.perf_counter()
        for _ in range(inner):
            work()
        synchronize(device)
        return (time.perf_counter() - begin) / inner

    def slowest(seconds: list[float]) -> list[float]:
        if not several:
            return seconds
        told = torch.tensor(seconds, dtype=torch.float64, device=device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        found: list[float] = told.tolist()
        return found

    [first] = slowest([min(once() for _ in range(WARM_UP))])
    count = min(MOST, max(LEAST, int(ENOUGH_S / max(first * inner, 1e-9))))
    return Timing.of(slowest([once() for _ in range(count)]))
