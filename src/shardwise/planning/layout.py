"""The key that identifies a layout: its kind and its degree along each axis."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.spec.mesh import Mesh
from shardwise.spec.strategy import Kind, Strategy


class Degrees(NamedTuple):
    """Degrees of tensor, context and expert parallelism."""

    tensor: int = 1
    context: int = 1
    # Whether context parallelism uses ring attention, such as with too few heads to divide.
    ring: bool = False
    # Devices that divide the experts; they see different sequences.
    expert: int = 1

    @classmethod
    def of(cls, strategy: Strategy) -> Degrees:
        ring = strategy.context > 1 and strategy.context_method == "ring"
        return cls(strategy.tensor, strategy.context, ring, strategy.expert)

    @property
    def inner(self) -> int:
        """Number of devices that work on the same sequences."""
        return self.tensor * self.context

    def divides(self, layout: Layout) -> bool:
        """Whether a layout has these degrees."""
        mesh = layout.mesh
        found = (mesh.tensor, mesh.context, layout.expert)
        return found == (self.tensor, self.context, self.expert)

    @property
    def fields(self) -> dict[str, object]:
        """These degrees as fields of a Strategy; context_method only if it must be ring."""
        ring = {"context_method": "ring"} if self.ring else {}
        return {
            "tensor": self.tensor,
            "context": self.context,
            "expert": self.expert,
            "tensor_across_nodes": False,
            **ring,
        }


UNDIVIDED = Degrees()


class Layout(NamedTuple):
    """Kind of sharding and device mesh. Settings such as prefetch or recompute are not included."""

    kind: Kind
    mesh: Mesh
    # Degree of expert parallelism, which takes no devices of its own.
    expert: int = 1

    @classmethod
    def of(cls, strategy: Strategy) -> Layout:
        """The layout of a resolved strategy."""
        return cls(strategy.kind, strategy.mesh, strategy.expert)

    def to_dict(self) -> dict[str, object]:
        return {"kind": self.kind, **self.mesh._asdict(), "expert": self.expert}

    @property
    def is_divided(self) -> bool:
        """Whether devices divide what a layer computes: tensor, context or expert parallelism."""
        return self.mesh.inner > 1 or self.expert > 1

    def as_kind(self, kind: Kind) -> Layout:
        """The layout with the same device mesh and another kind of sharding."""
        return self._replace(kind=kind)

    def over_all_devices(self) -> Layout:
        """The layout of the same kind without replicas: sharded over all data-parallel devices."""
        return self._replace(mesh=self.mesh._replace(replicate=1, shard=self.mesh.data_parallel))
