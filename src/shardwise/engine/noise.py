"""Random numbers of stochastic rounding that a resumed run draws again and that replicas share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.tensor import DTensor, Shard

from shardwise.pytorch.device import random_states, set_random_states


@contextmanager
def seeded(parameter: torch.Tensor, *numbers: int) -> Iterator[None]:
    """A context whose random numbers follow from `numbers` and from the shard of `parameter`.

    Ranks with the same shard draw the same, so that replicas stay equal. The generators are
    restored afterwards: dropout draws what it would have drawn.
    """
    device = parameter.device
    before = random_states(device)
    named = "/".join(map(str, (*numbers, *_shard(parameter)))).encode()
    torch.manual_seed(int.from_bytes(hashlib.blake2b(named, digest_size=4).digest(), "little"))
    try:
        yield
    finally:
        set_random_states(before, device)


def _shard(parameter: torch.Tensor) -> tuple[int, ...]:
    """The position of this rank's shard of a parameter; empty if it is not sharded."""
    if not isinstance(parameter, DTensor):
        return ()
    coordinate = parameter.device_mesh.get_coordinate() or ()
    placed = zip(coordinate, parameter.placements, strict=True)
    return tuple(index for index, placement in placed if isinstance(placement, Shard))
