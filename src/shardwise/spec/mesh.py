"""The axes of a device mesh: who holds which part of the model, and who sees which data."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Axis = Literal["replicate", "shard"]


class Mesh(NamedTuple):
    """Degrees of parallelism along named axes, outer to inner; an axis of 1 splits nothing.

    Neighbours along the innermost axis are neighbouring devices, so it fills a node first.
    """

    # Copies of the model states.
    replicate: int = 1
    # Devices that share one copy.
    shard: int = 1

    @property
    def devices(self) -> int:
        return math.prod(self)

    @property
    def data_parallel(self) -> int:
        """Devices, or groups of them, that see different sequences."""
        return self.replicate * self.shard

    def stride(self, axis: Axis) -> int:
        """How many devices lie between neighbours along an axis."""
        return math.prod(self[self._fields.index(axis) + 1 :])
