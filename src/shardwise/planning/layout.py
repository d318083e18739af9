"""The key that identifies a layout: its kind and its degree along each axis."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.spec.mesh import Mesh
from shardwise.spec.strategy import Kind, Strategy


class Layout(NamedTuple):
    """Where the model states live. Settings such as prefetch or recompute are no part of it."""

    kind: Kind
    mesh: Mesh

    @classmethod
    def of(cls, strategy: Strategy) -> Layout:
        """The layout of a resolved strategy."""
        return cls(strategy.kind, strategy.mesh)

    def to_dict(self) -> dict[str, object]:
        return {"kind": self.kind, **self.mesh._asdict()}

    def as_kind(self, kind: Kind) -> Layout:
        """The same groups under another kind of sharding."""
        return self._replace(kind=kind)

    def over_all_devices(self) -> Layout:
        """The same kind, sharded over all devices."""
        return self._replace(mesh=Mesh(shard=self.mesh.data_parallel))
