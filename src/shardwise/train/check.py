"""The result of one check of `shardwise doctor`, and how counted collectives differ."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Check(NamedTuple):
    """A check; `passed` is None if it was not run. `detail` says what to change."""

    name: str
    passed: bool | None
    detail: str


def traffic_difference(
    predicted: Mapping[tuple[str, int, str], tuple[int, ...]],
    counted: Mapping[tuple[str, int, str], tuple[int, ...]],
) -> str:
    """The collectives whose calls or bytes differ from the prediction."""
    differences = []
    for key in sorted({*predicted, *counted}):
        (calls, size), (seen, moved) = predicted.get(key, (0, 0)), counted.get(key, (0, 0))
        if (calls, size) != (seen, moved):
            differences.append(
                f"{key[0].replace('_', '-')} over {key[1]} ranks ({key[2]}): {seen} calls of "
                f"{moved:,} bytes counted, {calls} of {size:,} predicted"
            )
    return "; ".join(differences)
