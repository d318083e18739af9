"""run.json: the small file by which runs are found, compared and queried.

Rank 0 writes it when training starts, about every half minute, and at the end. It is in the run
folder and, with `train.checkpoint.to`, next to the checkpoints too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal

import msgspec

NAME = "run.json"
SCHEMA = 1
# Seconds between two writes, and seconds without a write after which a run counts as lost.
WRITE_EVERY_S, LOST_AFTER_S = 30.0, 300.0

# The folder of a replica group, in that of its run.
_GROUP = re.compile(r"replica-\d+")

State = Literal["training", "done", "stopped", "data ended", "failed", "lost"]
Value = str | int | float | bool


class RunRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A run: its settings, its progress, and its last values. Times are Unix seconds."""

    schema: int
    name: str
    # "lost" is never written: readers show it for "training" without an update.
    state: State
    started: float
    updated: float
    step: int
    planned_steps: int
    model: str
    parameters: int
    # The shorthand of the strategy and of the cluster: zero3:8, 4x8xH100-SXM@400Gbps.
    strategy: str
    cluster: str
    devices: int
    version: str
    # Values of the last log line, such as loss; step_s, tokens_per_s and mfu are of the median step
    # of the run, as in its measurement.
    values: dict[str, float] = {}
    predicted_step_s: float | None = None
    # Peak of tensors on the fullest device.
    predicted_peak_bytes: int | None = None
    peak_bytes: int | None = None
    recoveries: int = 0
    # Where the last checkpoint is.
    checkpoint: str | None = None
    # The sections of its run.toml, every default filled in.
    settings: dict[str, Any] = {}

    def seen_at(self, now: float) -> RunRecord:
        """The record as read at Unix time `now`: a run without updates is lost."""
        silent = self.state == "training" and now - self.updated > LOST_AFTER_S
        return msgspec.structs.replace(self, state="lost") if silent else self

    def flat(self) -> dict[str, Value]:
        """Every known value by its key; settings by their path, such as train.learning_rate."""
        own = {
            field: getattr(self, field)
            for field in self.__struct_fields__
            if field not in ("schema", "values", "settings")
        }
        known = {key: value for key, value in own.items() if value is not None}
        return {**known, **self.values, **_flattened(self.settings)}


def _flattened(settings: Mapping[str, Any], at: str = "") -> dict[str, Value]:
    """The values of nested settings by their path, such as train.seed."""
    flat: dict[str, Value] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flattened(value, f"{at}{key}.")
        else:
            flat[f"{at}{key}"] = value if isinstance(value, Value) else str(value)
    return flat


def name_of(folder: PurePath) -> str:
    """The name of the run in a folder; for a replica group, the run and the group."""
    is_group = _GROUP.fullmatch(folder.name) and folder.parent.name
    return f"{folder.parent.name}/{folder.name}" if is_group else folder.name


def is_done(data: bytes, steps: int) -> bool:
    """Whether the content of a run.json says that a run of `steps` steps ended by itself."""
    try:
        record = msgspec.json.decode(data, type=RunRecord)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return False
    return record.state in ("done", "data ended") and record.planned_steps == steps
