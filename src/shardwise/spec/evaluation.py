"""The `[eval]` section: the held-out loss of a run, from which data, and how often."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictBool, field_validator

from shardwise.spec.quantity import Count
from shardwise.spec.record import Record
from shardwise.spec.train import DataSettings, Steps


class EvalSettings(Record):
    """The `[eval]` section: held-out data, on which the loss is computed without training on it.

    It is computed after every so many steps and at the end of the run.
    """

    # Held-out data: a path, a list of paths, or a table of the keys of [data]. Keys that are not
    # given are those of [data]. Default: synthetic tokens other than those of [data].
    data: DataSettings = DataSettings()
    # Steps from one evaluation to the next. 0: only at the end of the run.
    every: Steps = 0
    # Positions per evaluation, rounded up to whole sequences. Default: all, up to 1,048,576; of
    # synthetic data and of your own iterable 16,384.
    tokens: Annotated[Count, Field(ge=1, le=10**12)] | None = None
    # Save a checkpoint whenever the loss is the lowest so far, and keep it beside the newest.
    keep_best: StrictBool = False

    @field_validator("data", mode="before")
    @classmethod
    def _path_to_table(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str | list | tuple) else value
