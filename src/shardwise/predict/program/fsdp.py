"""The events of a step with `fully_shard`: its forward, its backward, and a reference model.

With Gloo, hooks wait for every collective.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.predict.program.events import ROOT_UNIT, Cost, Event
from shardwise.predict.program.fsdp_backward import FsdpBackward
from shardwise.predict.program.fsdp_forward import FsdpForward
from shardwise.units.unit import Unit


class Fsdp(FsdpForward, FsdpBackward):
    """The events of a step whose parameters are sharded with `fully_shard`."""

    def lend(self, unit: Unit, index: int) -> Iterator[Event]:
        blocks = self.integer and index != ROOT_UNIT
        for group in unit.groups:
            axis, cost = ("reshard", "gather_again") if blocks else (group.axis, "gather")
            found = Cost(cost, (group,))
            yield from self._all_gather(group, index, found, axis, self.c.reshard_forward)

    def lent(self, unit: Unit, index: int) -> Iterator[Event]:
        for group in unit.groups:
            yield from self._copy_out(group, index, self.c.reshard_forward)
