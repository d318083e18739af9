"""The axes of a device mesh: who holds which part of the model, and who sees which data."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Axis = Literal["replicate", "shard", "context", "tensor"]
AXES: tuple[Axis, ...] = ("replicate", "shard", "context", "tensor")


class Mesh(NamedTuple):
    """Degrees of parallelism along named axes, outer to inner; an axis of 1 splits nothing.

    Neighbours along the innermost axis are neighbouring devices, so it fills a node first.
    """

    # Copies of the model states.
    replicate: int = 1
    # Devices that share one copy and see different sequences.
    shard: int = 1
    # Devices that share one copy and see parts of the same sequences.
    context: int = 1
    # Devices that divide every matrix, and compute together on the same tokens.
    tensor: int = 1

    @property
    def devices(self) -> int:
        return math.prod(self)

    @property
    def data_parallel(self) -> int:
        """Devices, or groups of them, that see different sequences."""
        return self.replicate * self.shard

    @property
    def states(self) -> int:
        """Devices that share one copy of the states: those of a context group share it too."""
        return self.shard * self.context

    @property
    def inner_degrees(self) -> list[str]:
        """The degrees inside a copy of the data in words: ["context 2", "tensor 8"]."""
        degrees = {"context": self.context, "tensor": self.tensor}
        return [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]

    @property
    def in_words(self) -> str:
        """The same behind a layout: " × context 2 × tensor 8"; empty without."""
        return "".join(f" × {degree}" for degree in self.inner_degrees)

    @property
    def inner(self) -> int:
        """Devices that work on the same sequences."""
        return self.context * self.tensor
