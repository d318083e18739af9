"""What replica groups say to each other before a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from shardwise.engine.mesh import world
from shardwise.engine.rank_tree import shared_tree
from shardwise.engine.replicas import Replicas
from shardwise.spec.record import SpecError
from shardwise.train.replicas.group import ReplicaGroup


class Entry(NamedTuple):
    """What one replica group says in a roll call."""

    present: int
    digest: int
    tokens: int
    stops: int
    # At the start of a group: how often it has tried to meet all others; 0 once it trains.
    tries: int
    # Whether a save of this group is in progress, and whether the last step is saved.
    saves: int = 0
    saved: int = 0


class RollCall(NamedTuple):
    """What all present replica groups say before a step, by the number of the group."""

    entries: Mapping[int, Entry]

    @property
    def tokens(self) -> int:
        return sum(entry.tokens for entry in self.entries.values())

    @property
    def is_left_by_some(self) -> bool:
        """Whether a group ends before this step, so that the others have to meet again."""
        return bool(self.refused()) or any(entry.stops for entry in self.entries.values())

    @property
    def all_stop(self) -> bool:
        return all(entry.stops for entry in self.entries.values())

    @property
    def is_saved(self) -> bool:
        return any(entry.saved for entry in self.entries.values())

    @property
    def has_saver(self) -> bool:
        return any(entry.saves for entry in self.entries.values())

    @property
    def first(self) -> int:
        """The first group that is present, which saves for all: they hold the same bits."""
        return min(self.entries)

    def refused(self) -> dict[int, str]:
        """Groups that cannot train with the others, and why: those that train already stay."""
        once = {number: entry for number, entry in self.entries.items() if entry.present == 1}
        first = min(once, key=lambda number: (once[number].tries > 0, number), default=None)
        problems = {}
        for number, entry in self.entries.items():
            if number not in once:
                problems[number] = (
                    f"SHARDWISE_REPLICA: {number} is the number of {entry.present} launches; give "
                    "each replica group its own"
                )
            elif first is not None and entry.digest != once[first].digest:
                problems[number] = (
                    f"replica group {number} trains another run than replica group {first}; start "
                    "all groups with the same run.toml"
                )
        return problems

    @property
    def tries(self) -> int:
        """How often groups that all just started have tried to meet; 0 if one trains already."""
        tries = [entry.tries for entry in self.entries.values()]
        return max(tries) if all(tries) else 0


def call_roll(replicas: Replicas, group: ReplicaGroup, entry: Entry) -> RollCall | None:
    """Exchange entries with the other groups; None if one of them was lost.

    All ranks of all groups call this. The first rank of a group speaks for it.

    Raises:
        SpecError: This group cannot train with the others.
    """
    # Each group fills its own row: a sum over groups, and then over ranks, gathers all.
    table = torch.zeros(group.total + 1, len(entry), dtype=torch.int64)
    if world()[0] == 0:
        table[group.number] = torch.tensor(entry)
        summed = replicas.sum(table[:-1])
        if summed is None:
            table.zero_()
        else:
            table[:-1] = summed
            table[-1] = 1
    shared_tree().all_reduce(table)
    *rows, intact = table.tolist()
    if not intact[0]:
        return None
    call = RollCall({number: Entry(*row) for number, row in enumerate(rows) if row[0]})
    if (problem := call.refused().get(group.number)) is not None:
        raise SpecError(problem)
    return call
