"""Durations and rules of the simulator for models of equal blocks."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np

from shardwise.predict.simulate import Durations, Rules

PER_BLOCK = [
    f.name
    for f in fields(Durations)
    if f.name
    in ("forward", "backward", "gather", "gather_again", "scatter", "reduce", "copy_out", "copy_in")
]
SCALARS = [f.name for f in fields(Durations) if f.name not in PER_BLOCK]


def uniform(blocks: int, **seconds: float) -> Durations:
    values: dict[str, Any] = {name: np.zeros((1, blocks)) for name in PER_BLOCK}
    values |= {name: np.zeros(1) for name in SCALARS}
    for name, value in seconds.items():
        shape = (1, blocks) if name in PER_BLOCK else (1,)
        values[name] = np.full(shape, value)
    return Durations(**values)


def rules(**changes: Any) -> Rules:
    usual = Rules(
        prefetch=np.asarray([1]),
        forward_prefetch=np.asarray([0]),
        separate=np.asarray([False]),
        waits=np.asarray([False]),
        joins=np.asarray([False]),
        contention=np.asarray([0.0]),
        accumulate=np.asarray([1]),
        gathers_every=np.asarray([True]),
        scatters_every=np.asarray([True]),
        reduces_every=np.asarray([True]),
    )
    return replace(usual, **{name: np.asarray([value]) for name, value in changes.items()})
