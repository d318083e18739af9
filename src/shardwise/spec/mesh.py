"""The axes of a device mesh: degrees of parallelism."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

Axis = Literal["replicate", "shard", "context", "tensor"]
AXES: tuple[Axis, ...] = ("replicate", "shard", "context", "tensor")
# Axes along which devices exchange data inside blocks. "expert" is a view of shard and context: it
# takes no devices of its own.
InnerAxis = Literal["tensor", "context", "expert"]
INNER_AXES: tuple[InnerAxis, ...] = ("tensor", "context", "expert")

# Groups that are made for one purpose, even where they span all processes.
OWN_GROUPS = ("context", "expert", "expert_shard")


class Mesh(NamedTuple):
    """Degrees of parallelism along named axes, outer to inner; a degree of 1 means no parallelism.

    Neighbours along the innermost axis are neighbouring devices, so that axis fills a node first.
    """

    # Copies of the model states.
    replicate: int = 1
    # Devices that share one copy of the model states and see different sequences.
    shard: int = 1
    # Devices that share one copy of the model states and see parts of the same sequences.
    context: int = 1
    # Devices that divide every matrix and compute on the same tokens.
    tensor: int = 1

    @property
    def devices(self) -> int:
        """Number of all devices: the product of the degrees."""
        return math.prod(self)

    @property
    def data_parallel(self) -> int:
        """Number of devices, or groups of devices, that see different sequences."""
        return self.replicate * self.shard

    @property
    def states(self) -> int:
        """Number of devices that share one copy of the model states: shard × context."""
        return self.shard * self.context

    @property
    def inner_degrees(self) -> list[str]:
        """Context and tensor degrees above 1 in words: ["context 2", "tensor 8"]."""
        degrees = {"context": self.context, "tensor": self.tensor}
        return [f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1]

    @property
    def in_words(self) -> str:
        """Context and tensor degrees above 1, to append to a layout: " × context 2 × tensor 8"."""
        return "".join(f" × {degree}" for degree in self.inner_degrees)

    @property
    def inner(self) -> int:
        """Number of devices that work on the same sequences: context × tensor."""
        return self.context * self.tensor
