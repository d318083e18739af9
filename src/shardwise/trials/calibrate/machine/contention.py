"""Measure how much compute and a collective slow each other down at the same time."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shardwise.trials.calibrate.machine.collectives import Group
from shardwise.trials.calibrate.machine.timing import timed

EDGE = 1024
MESSAGE = 2**24


def measure_contention(device: torch.device, group: Group) -> float:
    """Seconds lost per second in which compute and an all-reduce overlap; 0 without loss."""
    a, b = (torch.randn(EDGE, EDGE, device=device) for _ in range(2))
    message = torch.zeros(MESSAGE // 4, device=device)
    product_s = timed(lambda: a @ b, device).median_s
    moved_s = timed(lambda: dist.all_reduce(message, group=group.handle), device).median_s
    # The times are those of the slowest process, hence the same count everywhere.
    products = max(1, round(moved_s / product_s))

    def beside() -> None:
        work = dist.all_reduce(message, group=group.handle, async_op=True)
        for _ in range(products):
            a @ b
        assert work is not None
        work.wait()

    both_s = timed(beside, device).median_s
    # If neither slowed the other, the longer one would hide the shorter one.
    computed_s = products * product_s
    return max(0.0, (both_s - max(moved_s, computed_s)) / min(moved_s, computed_s))
