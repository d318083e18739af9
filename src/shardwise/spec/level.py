"""The level of a user's stack: how long its measured steps took relative to the prediction."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardwise.spec.record import Record


class Level(Record):
    """Measured seconds per predicted second: the geometric mean over measured steps."""

    factor: Annotated[float, Field(gt=0.01, lt=100)]
    steps: Annotated[int, Field(ge=1, le=1000)] = 1
    # The kind of runs measured: "dense", "low-bit", "adapters" or "experts".
    regime: str = "dense"
