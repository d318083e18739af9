"""What measured steps of a user's own say of a stack: how long they took for what was predicted."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardwise.spec.record import Record


class Level(Record):
    """Seconds measured per second predicted, the geometric mean over so many measured steps."""

    factor: Annotated[float, Field(gt=0.01, lt=100)]
    steps: Annotated[int, Field(ge=1, le=1000)] = 1
    # The kind of runs they are of: "dense", "low-bit", "adapters" or "experts".
    regime: str = "dense"
