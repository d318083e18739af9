"""Count the calls and bytes of collectives when they are dispatched, without synchronisation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.pytorch.dispatch import DispatchMode
from shardwise.pytorch.private import COLLECTIVES, group_by_name

# Stands for the group of all processes, if no axis of the mesh has that group.
WORLD = "world"


class CollectiveCount(NamedTuple):
    """Calls and bytes of collectives of one kind; `bytes` sums the full messages of the group.

    A full message is what all ranks of the group together gather, scatter or reduce; for an all-to-
    all, what one rank exchanges.
    """

    calls: int
    bytes: int


class CollectiveCounter(DispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives while entered; `counts` maps (operation, group size, axis) to Counted.

    `axes` maps names of process groups to axes. FSDP creates smaller groups to reshard to; a group
    that is not in `axes` counts as the shard axis.
    """

    # Collectives inside DTensor operations are counted too.
    composed_of_plain = frozenset({DTensor})

    def __init__(self, axes: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._axes = axes or {}
        self.counts: dict[tuple[str, int, str], CollectiveCount] = {}

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Count one operation if it is a collective."""
        if func in COLLECTIVES:
            name, size_of = COLLECTIVES[func]
            self._add(name, size_of(args), _group(args))

    def _add(self, name: str, size: int, group: dist.ProcessGroup) -> None:
        """Add a call and its `size` bytes, unless the group has one rank."""
        if group.size() == 1:
            return  # one rank sends nothing
        key = (name, group.size(), self._axis(name, group))
        before = self.counts.get(key, CollectiveCount(0, 0))
        self.counts[key] = CollectiveCount(before.calls + 1, before.bytes + size)

    def _axis(self, operation: str, group: dist.ProcessGroup) -> str:
        """The axis of a group; for groups without a name in `axes`, WORLD or "shard"."""
        other = WORLD if group == dist.group.WORLD else "shard"
        axis = self._axes.get(group.group_name, other)
        # One group may shard all states and divide the experts: it exchanges tokens only for these.
        return "expert" if operation == "all_to_all" and axis == "shard" else axis


def _group(args: tuple[Any, ...]) -> dist.ProcessGroup:
    """The process group of a collective: an argument, or the last argument is the group's name."""
    boxed = next((a for a in args if isinstance(a, torch.ScriptObject)), None)
    return dist.ProcessGroup.unbox(boxed) if boxed is not None else group_by_name(args[-1])
