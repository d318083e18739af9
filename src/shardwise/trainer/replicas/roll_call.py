"""The roll call: replica groups exchange their states before each step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch

from shardwise.engine.mesh import world
from shardwise.engine.rank_tree import shared_tree
from shardwise.engine.replicas import Replicas
from shardwise.spec.record import SpecError
from shardwise.trainer.replicas.group import ReplicaGroup


class Entry(NamedTuple):
    """What one replica group reports in a roll call, as integers: a sum gathers all entries.

    `present` is 1; more if several launches have the same number. `digest` identifies the run,
    `tokens` are those of the step that count for the loss, and `stops` is 1 if the group ends.
    """

    present: int
    digest: int
    tokens: int
    stops: int
    # How often a starting group has tried to meet all others; 0 once it trains.
    tries: int
    # Whether a save of this group is in progress, and whether the last step is saved.
    saves: int = 0
    saved: int = 0


class RollCall(NamedTuple):
    """The entries of all present replica groups, by number of the group."""

    entries: Mapping[int, Entry]

    @property
    def tokens(self) -> int:
        """Tokens of the step that count for the loss, over all present groups."""
        return sum(entry.tokens for entry in self.entries.values())

    @property
    def is_left_by_some(self) -> bool:
        """Whether a present group does not take part in this step, so that all must meet again."""
        return bool(self.refused()) or any(entry.stops for entry in self.entries.values())

    @property
    def all_stop(self) -> bool:
        """Whether all present groups end before this step."""
        return all(entry.stops for entry in self.entries.values())

    @property
    def is_saved(self) -> bool:
        """Whether any group has seen the checkpoint of the last step complete."""
        return any(entry.saved for entry in self.entries.values())

    @property
    def has_saver(self) -> bool:
        """Whether a save of any group is in progress."""
        return any(entry.saves for entry in self.entries.values())

    @property
    def first(self) -> int:
        """The lowest number of a present group. It saves for all, since all hold the same bits."""
        return min(self.entries)

    def refused(self) -> dict[int, str]:
        """Groups that cannot train with the others, by number, with the reason as a sentence.

        If two groups train different runs, the one that trains already stays.
        """
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
        """The most attempts to meet of any group, if all just start; 0 if one trains already."""
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
