"""The key that identifies a layout: its kind and its degree along each axis."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.spec.strategy import Kind, Strategy


class Layout(NamedTuple):
    """Where the model states live. Settings such as prefetch or recompute are no part of it."""

    kind: Kind
    shard: int
    replicate: int

    @classmethod
    def of(cls, strategy: Strategy) -> Layout:
        """The layout of a resolved strategy."""
        return cls(strategy.kind, strategy.shard or 1, strategy.replicate or 1)

    def as_kind(self, kind: Kind) -> Layout:
        """The same groups under another kind of sharding."""
        return self._replace(kind=kind)

    def over_all_devices(self) -> Layout:
        """The same kind, sharded over all devices."""
        return self._replace(shard=self.shard * self.replicate, replicate=1)
