"""Time collectives by message size and group, as the engine calls them, and fit a line to each.

The line is by the bytes a ring puts on its slowest link, whatever the backend really does: a
backend that runs a reduce-scatter as an all-reduce shows half the rate, and that is what it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from shardwise.engine.mesh import processes_per_node
from shardwise.pytorch.device import is_accelerator
from shardwise.trials.calibrate.machine.line import Line, fit_line
from shardwise.trials.calibrate.machine.timing import Step, Timing, timed

Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
OPERATIONS: tuple[Operation, ...] = ("all_gather", "reduce_scatter", "all_reduce")
GroupPlace = Literal["inside a node", "between nodes", "all"]
# Message sizes in bytes, of the full group. Slow links skip the largest; so do CPUs, where caches
# and pages would be measured instead.
SIZES = (*(2**power for power in range(16, 20, 2)), *(2**power for power in range(20, 31)))
LARGEST, LARGEST_ON_CPU = 2**30, 2**25
LONGEST_S = 0.4
# The collectives that a mesh uses in each kind of group. Shards, replicas and tensor groups can be
# inside a node or have one member in each node; context groups exchange heads.
OPERATIONS_BY_PLACE: dict[GroupPlace, tuple[Operation, ...]] = {
    "inside a node": (*OPERATIONS, "all_to_all"),
    "between nodes": (*OPERATIONS, "all_to_all"),
    "all": OPERATIONS,
}


class Group(NamedTuple):
    """A process group that this process belongs to, with `members` processes."""

    place: GroupPlace
    members: int
    handle: dist.ProcessGroup


class Message(NamedTuple):
    """The timing of one operation with a message of `size` bytes."""

    size: int
    timing: Timing


class Collective(NamedTuple):
    """One operation in one kind of group.

    `line` gives seconds by the bytes that a ring puts on its slowest link.
    """

    operation: Operation
    place: GroupPlace
    members: int
    messages: list[Message]
    line: Line


def ring_share(operation: Operation, members: int) -> float:
    """Bytes that each member of a ring sends, per byte of the full message."""
    once = (members - 1) / members
    return 2 * once if operation == "all_reduce" else once


def groups() -> list[Group]:
    """The process groups of this process: in its node, across nodes, and all, where they differ.

    Every process must call this, since all groups are created in the same order.
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
    """Time each operation in each group by message size; yield them one by one.

    `made` are the groups, and `step` is called before each measurement. All processes call this.
    """
    largest = LARGEST if is_accelerator(device) else LARGEST_ON_CPU
    for group in made:
        for operation in OPERATIONS_BY_PLACE[group.place]:
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
    """Whether a message of `size` bytes would take too long; never among the first four."""
    if len(messages) < 4:
        return False
    last = messages[-1]
    return last.timing.median_s * size / last.size > LONGEST_S


def _call(
    operation: Operation, size: int, group: Group, device: torch.device
) -> Callable[[], object]:
    """A function that runs the operation once on a message of about `size` bytes."""
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
