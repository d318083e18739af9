"""Refuse JSON with duplicate keys: readers keep one value and do not check the other."""

from __future__ import annotations

from typing import Any


class KeyTwiceError(ValueError):
    """A JSON object has the same key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"key {key[:40]!r} comes twice; keep one")
        self.key = key


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A dict of a JSON object's pairs, for `object_pairs_hook`; KeyTwiceError for duplicates."""
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise KeyTwiceError(key)
        table[key] = value
    return table
