"""Collectives by size and group, called as the engine calls them, and a line through each.

The line is through bytes a ring puts on its slowest link, whatever the backend really does: a
backend that runs a reduce-scatter as an all-reduce shows half the rate, and that is what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from shardwise.calibrate.machine.line import Line, fit_line
from shardwise.calibrate.machine.timing import Step, Timing, timed
from shardwise.engine.device import is_accelerator
from shardwise.engine.mesh import processes_per_node

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
OPERATIONS: tuple[Operation, ...] = ("all_gather", "reduce_scatter", "all_reduce")
Place = Literal["inside a node", "between nodes", "all"]
# Bytes of a whole group's message. A slow link is not given the largest, and neither is a CPU,
# whose caches and pages would be measured instead.
SIZES = (*(2**power for power in range(16, 20, 2)), *(2**power for power in range(20, 31)))
LARGEST, LARGEST_ON_CPU = 2**30, 2**25
LONGEST_S = 0.4
# What the axes of a mesh ask of each kind of group. Shards, replicas and tensor groups can lie
# inside a node or with one member in each; context groups exchange heads.
ASKED: dict[Place, tuple[Operation, ...]] = {
    "inside a node": (*OPERATIONS, "all_to_all"),
    "between nodes": (*OPERATIONS, "all_to_all"),
    "all": OPERATIONS,
}


class Group(NamedTuple):
    """Processes that take part together; `members` of them."""

    place: Place
    members: int
    handle: dist.ProcessGroup


class Message(NamedTuple):
    """One size of one operation."""

    size: int
    timing: Timing


class Collective(NamedTuple):
    """One operation in one kind of group; `line` is by bytes of a ring on its slowest link."""

    operation: Operation
    place: Place
    members: int
    messages: list[Message]
    line: Line


def ring_share(operation: Operation, members: int) -> float:
    """Bytes each member sends, per byte of the whole message."""
    once = (members - 1) / members
    return 2 * once if operation == "all_reduce" else once


def groups() -> list[Group]:
    """Those of one node, those of one process per node, and all, where these differ.

    Every process makes them in the same order, and is given those it belongs to.
    """
    size = dist.get_world_size()
    per_node = processes_per_node()
    nodes = size // per_node
    found = []
    if per_node > 1:
        inside, _ = dist.new_subgroups(per_node)  # type: ignore[no-untyped-call]
        found.append(Group("inside a node", per_node, inside))
    if nodes > 1 and per_node > 1:
        ranks = [[node * per_node + local for node in range(nodes)] for local in range(per_node)]
        across, _ = dist.new_subgroups_by_enumeration(ranks)  # type: ignore[no-untyped-call]
        found.append(Group("between nodes", nodes, across))
    if nodes > 1:
        found.append(Group("all", size, dist.new_group(list(range(size)))))
    return found


def measure_collectives(
    device: torch.device, made: list[Group], step: Step
) -> Iterator[Collective]:
    largest = LARGEST if is_accelerator(device) else LARGEST_ON_CPU
    for group in made:
        for operation in ASKED[group.place]:
            messages: list[Message] = []
            for size in SIZES:
                if size > largest or _too_long(messages, size):
                    break
                step(f"{operation} {group.place}", f"{size // 1024} KiB")
                call = _call(operation, size, group, device)
                # All groups of a kind work at once, as in training; the slowest counts.
                messages.append(Message(size, timed(call, device)))
            share = ring_share(operation, group.members)
            line = fit_line([(share * one.size, one.timing.usual) for one in messages])
            yield Collective(operation, group.place, group.members, messages, line)


def _too_long(messages: list[Message], size: int) -> bool:
    """A line needs a few points, however slow."""
    if len(messages) < 4:
        return False
    last = messages[-1]
    return last.timing.median_s * size / last.size > LONGEST_S


def _call(
    operation: Operation, size: int, group: Group, device: torch.device
) -> Callable[[], object]:
    numbers = size // 4 // group.members * group.members
    whole = torch.zeros(numbers, device=device)
    shard = torch.zeros(numbers // group.members, device=device)
    if operation == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, shard, group.handle)
    if operation == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(shard, whole, group=group.handle)
    if operation == "all_to_all":
        sent = torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(whole, sent, group=group.handle)
    return lambda: dist.all_reduce(whole, group=group.handle)
