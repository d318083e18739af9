"""The result of one check of `shardwise doctor`."""

from __future__ import annotations

from typing import NamedTuple


class Check(NamedTuple):
    """A check; `passed` is None if it was not run. `detail` says what to change."""

    name: str
    passed: bool | None
    detail: str
