"""Owners of the memory at the peak: live allocations by line of code and by kind."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from shardwise.observe.memory.allocator import Event, Frame
from shardwise.observe.memory.frames import Owner, owner_of
from shardwise.observe.memory.record import Holder, Share
from shardwise.observe.memory.timeline import Allocation

ALLOCATED_BEFORE = Owner(
    None, None, "allocated before the recording", "not recorded", in_loss=False
)
WITHOUT_STACK = Owner(None, None, "no stack recorded", "unknown", in_loss=False)
_ENGINE = "torch::autograd::Engine::evaluate_function"


class LiveMemory(NamedTuple):
    """Live bytes by kind and by owner, the largest first; each of the two sums to all live bytes.

    `loss_bytes`, `loss_place` and `transient_bytes` are as in `Memory`.
    """

    categories: tuple[Share, ...]
    holders: tuple[Holder, ...]
    loss_bytes: int | None
    loss_place: str | None
    transient_bytes: int | None


def owners_of(
    allocations: Sequence[Allocation], stacks: Sequence[Sequence[Frame]], events: Sequence[Event]
) -> list[Owner]:
    """Owner of every allocation.

    Memory that a backward allocates and does not free is a gradient.
    """
    owner_of_stack = [owner_of(stack) for stack in stacks]
    owners = [_owner(one, owner_of_stack) for one in allocations]
    outside = [
        one.born
        for one, owner in zip(allocations, owners, strict=True)
        if owner.category in ("forward", "optimizer", "parameters")
    ]
    ends_inside = _ends_inside_backward(events, stacks)
    for number, (one, owner) in enumerate(zip(allocations, owners, strict=True)):
        if owner.category != "backward":
            continue
        following = bisect_right(outside, one.born)
        if following < len(outside):
            outlives = one.alive_after(outside[following])
        else:
            outlives = one.died is None and not ends_inside
        if outlives:
            owners[number] = owner._replace(category="gradients")
    return owners


def live_memory_at(
    event: int, allocations: Sequence[Allocation], owners: Sequence[Owner]
) -> LiveMemory:
    """Memory that is live after an event, by kind and by owner, the largest first."""
    by_owner: dict[Owner, list[int]] = {}
    kinds: dict[str, int] = {}
    in_loss = transient = 0
    stacks_known = False
    for one, owner in zip(allocations, owners, strict=True):
        if not one.alive_after(event):
            continue
        stacks_known = stacks_known or owner not in (ALLOCATED_BEFORE, WITHOUT_STACK)
        held = by_owner.setdefault(owner, [0, 0])
        held[0] += one.size
        held[1] += 1
        kinds[owner.category] = kinds.get(owner.category, 0) + one.size
        in_loss += one.size * owner.in_loss
        transient += one.size * (owner.category == "optimizer" and one.died is not None)
    categories = (Share(kind, size) for kind, size in kinds.items())
    holders = {
        owner: Holder(owner.file, owner.line, owner.function, owner.category, size, count)
        for owner, (size, count) in by_owner.items()
    }
    losses = [h for o, h in holders.items() if o.in_loss and o.file is not None]
    worst = max(losses, key=lambda holder: holder.bytes, default=None)
    return LiveMemory(
        tuple(sorted(categories, key=lambda share: -share.bytes)),
        tuple(sorted(holders.values(), key=lambda holder: -holder.bytes)),
        in_loss if stacks_known else None,
        None if worst is None else worst.place,
        transient if stacks_known else None,
    )


def _owner(one: Allocation, owner_of_stack: Sequence[Owner]) -> Owner:
    """Owner of an allocation by its stack; WITHOUT_STACK or ALLOCATED_BEFORE without a stack."""
    if one.stack is not None:
        return owner_of_stack[one.stack]
    return WITHOUT_STACK if one.recorded else ALLOCATED_BEFORE


def _ends_inside_backward(events: Sequence[Event], stacks: Sequence[Sequence[Frame]]) -> bool:
    """Whether the last recorded stack is inside the autograd engine."""
    last = next((event.stack for event in reversed(events) if event.stack is not None), None)
    return last is not None and any(_ENGINE in frame.function for frame in stacks[last])
