"""Refuse JSON in which a key comes twice: readers keep one value, and never check the other."""

from __future__ import annotations

from typing import Any


class KeyTwiceError(ValueError):
    """`key` comes twice in one object."""

    def __init__(self, key: str) -> None:
        super().__init__(f"key {key[:40]!r} comes twice; keep one")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of its pairs: the `object_pairs_hook` of `json.loads`."""
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise KeyTwiceError(key)
        table[key] = value
    return table
