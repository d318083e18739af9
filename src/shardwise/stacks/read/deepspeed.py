"""Read a DeepSpeed JSON configuration as settings of a run."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.stacks.deepspeed.table import READ
from shardwise.stacks.outcomes import Outcome
from shardwise.stacks.read import known_keys
from shardwise.stacks.read.imported import Imported, Reading
from shardwise.stacks.table import list_unknown_keys, read_rows


def read(table: Mapping[str, object]) -> Imported:
    """The settings of the JSON.

    A value "auto" is reported as lost; callers that know it replace it first.
    """
    reading = Reading("a DeepSpeed configuration")
    list_unknown_keys(READ, table, reading, known_keys.DEEPSPEED)
    read_rows(READ, table, reading)
    return reading.finish()


def read_file(table: Mapping[str, object]) -> Imported:
    """The settings of a JSON on its own: without a scheduler its learning rate stays.

    Inside another stack's file, that stack decides the schedule.
    """
    found = read(table)
    if not table.get("optimizer") or table.get("scheduler"):
        return found
    constant: dict[str, object] = {"train.schedule": "constant"}
    outcome = Outcome("default", "scheduler", fields=constant)
    train = {**found.train, "schedule": "constant"}
    return found._replace(train=train, outcomes=(*found.outcomes, outcome))
