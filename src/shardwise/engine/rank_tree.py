"""All ranks as a tree of small groups, in which every rank is connected to a few others.

A group of all N ranks costs each of them N sockets, and its all-reduce is a ring of 2 (N - 1) hops.
Above `ONE_GROUP` ranks there are three levels of groups of about the cube root of N: values are
reduced to the first rank of each group, from level to level, and broadcast back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from shardwise.engine.device import ONE_GROUP, host_group
from shardwise.engine.mesh import world

# Bytes of a sentence that is sent to all ranks.
_SENTENCE = 512


class Failure(NamedTuple):
    """The lowest rank that failed, and its reason."""

    rank: int
    why: str


class _Group(NamedTuple):
    """A group of one level; None is the group of all ranks."""

    group: dist.ProcessGroup | None
    first: int
    is_top: bool


class RankTree:
    """Collectives of small tensors between all ranks, on the CPU.

    All ranks create it at the same time, and call the same methods in the same order.
    """

    def __init__(self, *, separate: bool, one_group: int = ONE_GROUP) -> None:
        """With `separate`, it uses no group of others: a thread of its own can use it."""
        self.rank, self.size = world()
        # The groups that this rank is in, from the lowest level to the highest.
        self._groups: list[_Group] = []
        if self.size > one_group:
            self._groups = _three_levels(self.rank, self.size)
        elif self.size > 1:
            self._groups = [_Group(host_group() if separate else None, 0, True)]

    def all_reduce(self, values: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        for collective in self._collectives(values, op):
            collective()

    def start_all_reduce(self, values: torch.Tensor) -> Callable[[], object]:
        """Start a sum over all ranks, and return what waits for its end.

        Until then no other method may be called: ranks would mix up the collectives of a group.
        """
        collectives = self._collectives(values, dist.ReduceOp.SUM)
        if not collectives:
            return lambda: None
        first, *others = collectives
        work = first(async_op=True)
        if not others:
            return work.wait  # type: ignore[no-any-return]

        def finish(done: torch.futures.Future[Any]) -> None:
            done.wait()
            for collective in others:
                collective()

        # Runs in a thread of the first group, while this one computes.
        return work.get_future().then(finish).wait  # type: ignore[no-any-return]

    def first_failure(self, why: str) -> Failure | None:
        """The first failure of any rank, on all ranks; an empty `why` is none of this rank."""
        first = torch.tensor([self.rank if why else self.size])
        self.all_reduce(first, dist.ReduceOp.MIN)
        rank = int(first)
        if rank == self.size:
            return None
        text = torch.zeros(_SENTENCE, dtype=torch.uint8)
        if rank == self.rank:
            data = why.encode()[:_SENTENCE]
            text[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.all_reduce(text)
        return Failure(rank, bytes(text.tolist()).rstrip(b"\0").decode(errors="ignore"))

    def _collectives(self, values: torch.Tensor, op: Any) -> list[Callable[..., Any]]:
        """What this rank takes part in: up to the last level it is in, and down again."""
        found: list[Callable[..., Any]] = []
        for group, first, is_top in self._groups:
            if is_top:
                found.append(partial(dist.all_reduce, values, op, group))
            else:
                found.append(partial(dist.reduce, values, first, op, group))
        for group, first, is_top in reversed(self._groups):
            if not is_top:
                found.append(partial(dist.broadcast, values, first, group))
        return found


# The process group of all ranks, and its tree. Who holds on to a group keeps its threads alive.
_shared: list[tuple[weakref.ref[dist.ProcessGroup], RankTree]] = []


def shared_tree(one_group: int = ONE_GROUP) -> RankTree:
    """The tree of the thread that trains; made once for a process group. All ranks call this."""
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        return RankTree(separate=False)
    if not _shared or _shared[0][0]() is not group:
        _shared[:] = [(weakref.ref(group), RankTree(separate=False, one_group=one_group))]
    return _shared[0][1]


def level_width(ranks: int) -> int:
    """The smallest size of groups with which three levels hold all ranks."""
    width = max(2, int(ranks ** (1 / 3)) - 1)
    while width**3 < ranks:
        width += 1
    return width


def _three_levels(rank: int, size: int) -> list[_Group]:
    """Create the groups of all levels; torch numbers groups, so all ranks create all of them."""
    width, members = level_width(size), list(range(size))
    found = []
    while len(members) > 1:
        parts = [members[at : at + width] for at in range(0, len(members), width)]
        for part in parts:
            group = host_group(part)
            if rank in part:
                found.append(_Group(group, part[0], len(parts) == 1))
        # The first rank of each group is in the next level.
        members = [part[0] for part in parts]
    return found
