"""Count the calls and bytes of collectives when they are dispatched, without synchronisation."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardwise.engine.torch_private import (
    ALL_GATHER,
    FUNCTIONAL_ALL_REDUCE,
    REDUCE_SCATTER,
    TorchDispatchMode,
    group_by_name,
)

_C10D = torch.ops.c10d


class Counted(NamedTuple):
    """One kind of collective in groups of one size; `bytes` sums the full messages of the group."""

    calls: int
    bytes: int


class CollectiveCounter(TorchDispatchMode):
    """Counts while it is entered. `counts` maps (operation, group size) to calls and bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: dict[tuple[str, int], Counted] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Count one operation if it is a collective, then run it."""
        if DTensor in types:
            # DTensor then dispatches again with plain tensors, collectives included.
            return NotImplemented
        if func.namespace == "c10d":
            self._count(func, args)
        elif func is FUNCTIONAL_ALL_REDUCE:
            self._add("all_reduce", args[0], group_by_name(args[2]))
        return func(*args, **(kwargs or {}))

    def _count(self, func: Any, args: tuple[Any, ...]) -> None:
        if func is ALL_GATHER:
            name, message = "all_gather", args[0]
        elif func is REDUCE_SCATTER:
            name, message = "reduce_scatter", args[1]
        elif func is _C10D.allreduce_.default:
            name, message = "all_reduce", args[0][0]
        elif func is _C10D.broadcast_.default:
            name, message = "broadcast", args[0][0]
        else:
            return
        group = next(a for a in args if isinstance(a, torch.ScriptObject))
        self._add(name, message, dist.ProcessGroup.unbox(group))

    def _add(self, name: str, message: torch.Tensor, group: dist.ProcessGroup) -> None:
        if group.size() == 1:
            return  # one rank sends nothing
        key = (name, group.size())
        before = self.counts.get(key, Counted(0, 0))
        self.counts[key] = Counted(before.calls + 1, before.bytes + message.nbytes)
