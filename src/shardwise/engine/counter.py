"""Calls and bytes of collectives, counted where they are dispatched; nothing is synchronised."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

_C10D = torch.ops.c10d
_FUNCTIONAL = torch.ops._c10d_functional


class Counted(NamedTuple):
    """One kind of collective in groups of one size; `bytes` is the whole group's message."""

    calls: int
    bytes: int


class CollectiveCounter(TorchDispatchMode):
    """Counts while entered. `found` maps (operation, group size) to calls and bytes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[tuple[str, int], Counted] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Look at one operation on its way to the engine."""
        if DTensor in types:
            # Let it become operations on plain tensors first, its collectives among them.
            return NotImplemented
        if func.namespace == "c10d":
            self._note(func, args)
        elif func is _FUNCTIONAL.all_reduce.default:
            self._add("all_reduce", args[0], _resolve_process_group(args[2]))
        return func(*args, **(kwargs or {}))

    def _note(self, func: Any, args: tuple[Any, ...]) -> None:
        if func is _C10D._allgather_base_.default:
            name, message = "all_gather", args[0]
        elif func is _C10D._reduce_scatter_base_.default:
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
            return  # alone, nothing moves
        key = (name, group.size())
        before = self.found.get(key, Counted(0, 0))
        self.found[key] = Counted(before.calls + 1, before.bytes + message.nbytes)
