"""Report which replica groups take part in training, whenever that changes."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path

from shardwise.engine.mesh import world
from shardwise.trainer.replicas.group import ReplicaGroup

log = logging.getLogger("shardwise")
FILE = "replicas.jsonl"


class Changes:
    """Logs changes of the groups that take part, and appends them to replicas.jsonl.

    Rank 0 of each group does so. `absent_batches` is the setting of that name.
    """

    def __init__(self, group: ReplicaGroup, absent_batches: str, folder: Path) -> None:
        self._group, self._absent_batches = group, absent_batches
        self._path = folder / FILE
        self._speaks = world()[0] == 0
        self._present: tuple[int, ...] = ()
        self._repeated = 0
        self._reasons: list[str] = []

    def repeated(self, step: int, reason: str) -> None:
        """Record that an attempt of a step was not committed, and why, for the next report."""
        self._repeated += 1
        self._reasons.append(reason)

    def healed(self, before: int, step: int) -> None:
        """Log that this group, at step `before`, received the state of step `step` from another."""
        if self._speaks:
            log.warning(
                "Replica group %d was at step %d and received the state of step %d from another",
                self._group.number, before, step,
            )  # fmt: skip

    def committed(self, step: int, present: tuple[int, ...]) -> None:
        """Report a committed step, if other groups took part than before or attempts failed.

        `present` are the numbers of the groups that took part.
        """
        repeated, self._repeated = self._repeated, 0
        reasons, self._reasons = [one for one in self._reasons if one], []
        if not self._speaks or (present == self._present and not repeated):
            return
        absent = [index for index in range(self._group.total) if index not in present]
        if present != self._present:
            log.warning("%s", change_sentence(step, present, absent, self._absent_batches))
        self._present = present
        change = {
            "step": step,
            "present": list(present),
            "absent": absent,
            "repeated_attempts": repeated,
            **({"reason": reasons[0]} if reasons else {}),
        }
        with self._path.open("a") as file:
            file.write(json.dumps(change) + "\n")


def change_sentence(
    step: int, present: Sequence[int], absent: Sequence[int], absent_batches: str
) -> str:
    """The log message on which groups train from `step` on.

    It says what happens to the batches of absent groups, too.
    """
    if not absent:
        return f"All {len(present)} replica groups train from step {step} on"
    fate = "dropped" if absent_batches == "dropped" else "given to the others"
    groups, verb = ("group", "is") if len(absent) == 1 else ("groups", "are")
    return (
        f"Replica {groups} {_listed(absent)} {verb} absent from step {step} on; {_listed(present)} "
        f"train{'s' if len(present) == 1 else ''} without, and the absent batches are {fate}"
    )


def _listed(numbers: Sequence[int]) -> str:
    """Numbers in words, such as '0, 2 and 3'."""
    *first, last = map(str, numbers)
    return f"{', '.join(first)} and {last}" if first else last
