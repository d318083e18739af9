"""All ranks as a tree of small groups, in which each rank is connected to few others.

A group of all N ranks costs each of them N sockets, and its all-reduce is a ring of 2 (N - 1) hops.
Above `ONE_GROUP` ranks there are three levels of groups of about the cube root of N: values go to
the first rank of each group, from level to level, and are broadcast back. Small values are
gathered, which takes two hops in a group of any size; larger ones are reduced in a ring.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.engine.mesh import world
from shardwise.pytorch.device import ONE_GROUP, host_group
from shardwise.spec.foreign_text import visible

# Maximum bytes of a text that is sent to all ranks.
_SENTENCE = 512
# Maximum bytes of a value that is sent to all ranks as JSON.
_LONGEST_VALUE = 2**24
# Maximum bytes of a gathered value: the first rank of a group holds one copy per member.
_SMALL = 2**16


class Failure(NamedTuple):
    """The lowest rank that failed, and its reason."""

    rank: int
    why: str


class _Group(NamedTuple):
    """A process group of one level and its ranks; a `group` of None is the group of all ranks."""

    group: dist.ProcessGroup | None
    ranks: list[int]
    is_top: bool


class _Step(NamedTuple):
    """A function that starts a collective, and one that completes its result."""

    start: Callable[..., Any]
    finish: Callable[[], object] = lambda: None


class RankTree:
    """Collectives of small tensors between all ranks, on the CPU.

    All ranks create it at the same time, and call the same methods in the same order.
    """

    def __init__(self, *, separate: bool, one_group: int | None = None) -> None:
        """Create the groups of all levels.

        `separate` uses groups that no other code uses, so that another thread can use the tree. Up
        to `one_group` ranks form a single group; None is ONE_GROUP.
        """
        self.rank, self.size = world()
        # The groups that this rank is in, from the lowest level to the highest.
        self._groups: list[_Group] = []
        if self.size > (ONE_GROUP if one_group is None else one_group):
            self._groups = _three_levels(self.rank, self.size)
        elif self.size > 1:
            everyone = list(range(self.size))
            self._groups = [_Group(host_group() if separate else None, everyone, True)]

    def all_reduce(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Reduce `values` over all ranks, in place."""
        for start, finish in self._steps(values, op):
            start()
            finish()

    def start_all_reduce(self, values: torch.Tensor) -> Callable[[], object]:
        """Start to sum `values` over all ranks in place; return a function that waits for the end.

        Until then no other method may be called: ranks would mix up the collectives of a group.
        """
        steps = self._steps(values, dist.ReduceOp.SUM)
        if not steps:
            return lambda: None
        if len(steps) == 1:
            return steps[0].start(async_op=True).wait  # type: ignore[no-any-return]
        done: Future[None] = Future()

        def take_all() -> None:
            try:
                for start, finish in steps:
                    start()
                    finish()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        # A thread runs the steps. A callback of the first collective would run in the caller's
        # thread if that collective has ended already, and the steps would not overlap. The thread
        # is a daemon, so that it cannot keep a process alive after its peers are lost.
        threading.Thread(target=take_all, name="agreement", daemon=True).start()
        return done.result

    def first_failure(self, why: str) -> Failure | None:
        """The failure of the lowest rank that failed, on all ranks; None if no rank failed.

        `why` is the reason of this rank; empty if it did not fail.
        """
        first = torch.tensor([self.rank if why else self.size])
        self.all_reduce(first, dist.ReduceOp.MIN)
        rank = int(first)
        return None if rank == self.size else Failure(rank, self.text_of(rank, why))

    def text_of(self, rank: int, text: str) -> str:
        """The text of one rank, on all ranks, safe to print and cut to 512 bytes."""
        values = torch.zeros(_SENTENCE, dtype=torch.uint8)
        if rank == self.rank:
            data = text.encode()[:_SENTENCE]
            values[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.all_reduce(values)
        return visible(bytes(values.tolist()).rstrip(b"\0").decode(errors="ignore"))

    def json_of(self, rank: int, value: Any) -> Any:
        """The value of one rank after a round trip through JSON, on all ranks.

        The object collectives of torch unpickle what they receive: an attacker with a connection to
        one rank could run code on the others.

        Raises:
            ValueError: The value is larger than 16 MiB as JSON.
        """
        data = json.dumps(value).encode() if rank == self.rank else b""
        length = torch.tensor([len(data)])
        self.all_reduce(length)
        if not 0 < int(length) <= _LONGEST_VALUE:
            raise ValueError(f"rank {rank} sends {int(length)} bytes; at most {_LONGEST_VALUE}")
        values = torch.zeros(int(length), dtype=torch.uint8)
        if data:
            values[:] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.all_reduce(values)
        return json.loads(bytes(values.numpy()))

    def _steps(self, values: torch.Tensor, op: Any) -> list[_Step]:
        """The collectives that this rank takes part in: up the levels, then down again."""
        if len(self._groups) == 1 and self._groups[0].is_top:
            return [_Step(partial(dist.all_reduce, values, op, self._groups[0].group))]
        collect = self._gather if values.nbytes <= _SMALL else _reduce
        up = [collect(values, op, group) for group in self._groups]
        down = [
            _Step(partial(dist.broadcast, values, ranks[0], group))
            for group, ranks, _ in reversed(self._groups)
        ]
        return up + down

    def _gather(self, values: torch.Tensor, op: Any, level: _Group) -> _Step:
        """A step that gathers values on the first rank of a group and reduces them there."""
        group, ranks, _ = level
        if self.rank != ranks[0]:
            return _Step(partial(dist.gather, values, None, ranks[0], group))
        found = torch.empty((len(ranks), *values.shape), dtype=values.dtype)
        gather = partial(dist.gather, values, list(found), ranks[0], group)
        return _Step(gather, lambda: _REDUCTIONS[op](found, values))


def _reduce(values: torch.Tensor, op: Any, level: _Group) -> _Step:
    """A step that reduces values to the first rank of a group."""
    return _Step(partial(dist.reduce, values, level.ranks[0], op, level.group))


_REDUCTIONS: dict[Any, Callable[[torch.Tensor, torch.Tensor], object]] = {
    dist.ReduceOp.SUM: lambda found, out: out.copy_(found.sum(0, dtype=out.dtype)),
    dist.ReduceOp.MAX: lambda found, out: out.copy_(found.amax(0)),
    dist.ReduceOp.MIN: lambda found, out: out.copy_(found.amin(0)),
}


# The process group of all ranks, and its tree. A strong reference would keep its threads alive.
_shared: list[tuple[weakref.ref[dist.ProcessGroup], RankTree]] = []


def shared_tree(one_group: int | None = None) -> RankTree:
    """The tree for the training thread, created once per process group; all ranks must call it."""
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        return RankTree(separate=False)
    if not _shared or _shared[0][0]() is not group:
        _shared[:] = [(weakref.ref(group), RankTree(separate=False, one_group=one_group))]
    return _shared[0][1]


def level_width(ranks: int) -> int:
    """The smallest group size with which three levels hold all ranks."""
    width = max(2, int(ranks ** (1 / 3)) - 1)
    while width**3 < ranks:
        width += 1
    return width


def _three_levels(rank: int, size: int) -> list[_Group]:
    """The groups of this rank, lowest level first.

    All ranks create the groups of all levels, because torch numbers groups.
    """
    width, members = level_width(size), list(range(size))
    found = []
    while len(members) > 1:
        parts = [members[at : at + width] for at in range(0, len(members), width)]
        for part in parts:
            group = host_group(part)
            if rank in part:
                found.append(_Group(group, part, len(parts) == 1))
        # The first rank of each group is in the next level.
        members = [part[0] for part in parts]
    return found
