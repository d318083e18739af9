"""The result of one check of `shardwise doctor`, and how counted collectives differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from shardwise.step.comparison import traffic_terms


class Check(NamedTuple):
    """A check; `passed` is None if it was not run. `detail` is its result, or what to change."""

    name: str
    passed: bool | None
    detail: str


def traffic_difference(
    predicted: Mapping[tuple[str, int, str], tuple[int, int]],
    counted: Mapping[tuple[str, int, str], tuple[int, int]],
) -> str:
    """The collectives whose calls or bytes differ from the prediction, in words.

    Both map (operation, ranks, axis) to (calls, bytes).
    """
    names = {
        (op, size, axis): f"{op.replace('_', '-')} over {size} ranks ({axis})"
        for op, size, axis in (*predicted, *counted)
    }
    return "; ".join(
        f"{names[key]}: {calls.second} calls of {size.second:,} bytes counted, {calls.first} of "
        f"{size.first:,} predicted"
        for key, (calls, size) in traffic_terms(predicted, counted, names).items()
        if (calls.first, size.first) != (calls.second, size.second)
    )
