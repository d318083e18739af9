"""Count the calls and bytes of collectives when they are dispatched, without synchronisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.engine.torch_private import COLLECTIVES, group_by_name
from shardwise.pytorch.dispatch import DispatchMode
from shardwise.spec.mesh import Axis

# The group of all processes, where no axis of the mesh spans them.
WORLD = "world"


class Counted(NamedTuple):
    """Collectives of one kind; `bytes` sums the full messages of the group.

    That is what all ranks of the group together gather, scatter or reduce, and in an all-to-all
    what one rank exchanges.
    """

    calls: int
    bytes: int


class CollectiveCounter(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts while it is entered. `counts` maps (operation, group size, axis) to calls and bytes.

    `axes` gives the axis of process groups by their names. FSDP makes smaller groups of its own to
    reshard to: a group that is not named belongs to the axis it shards over.
    """

    # Its collectives included.
    composed_of_plain = frozenset({DTensor})

    def __init__(self, axes: Mapping[str, Axis] | None = None) -> None:
        super().__init__()
        self._axes = axes or {}
        self.counts: dict[tuple[str, int, str], Counted] = {}

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count one operation if it is a collective."""
        if func in COLLECTIVES:
            name, size_of = COLLECTIVES[func]
            self._add(name, size_of(args), _group(args))

    def _add(self, name: str, size: int, group: dist.ProcessGroup) -> None:
        if group.size() == 1:
            return  # one rank sends nothing
        key = (name, group.size(), self._axis(group))
        before = self.counts.get(key, Counted(0, 0))
        self.counts[key] = Counted(before.calls + 1, before.bytes + size)

    def _axis(self, group: dist.ProcessGroup) -> str:
        other = WORLD if group == dist.group.WORLD else "shard"
        return self._axes.get(group.group_name, other)


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The group of a collective: an argument, or for a functional one its name, the last."""
    boxed = next((a for a in args if isinstance(a, torch.ScriptObject)), None)
    return dist.ProcessGroup.unbox(boxed) if boxed is not None else group_by_name(args[-1])
