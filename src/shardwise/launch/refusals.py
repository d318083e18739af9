"""Count connections and messages that a server refused, and report them now and then."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum

# Seconds between two reports of the same reason.
_REPORT_EVERY_S = 30.0


class Reason(StrEnum):
    """Why something is refused, in the words of the report."""

    STRANGER = "it is no launcher"
    NO_SECRET = "it does not know the secret of this rendezvous"
    SILENT = "it did not identify itself in time"
    CROWD = "too many others had not identified themselves"
    FORGED = "a message was forged or repeated"
    TOO_LONG = "a message was too long"
    BAD_POST = "a message had values that no launcher sends"
    OTHER_HOST = "it spoke for another host"
    TOO_MANY_HOSTS = "there are too many hosts"


class Refusals:
    """Counts refusals; reports each reason at most once in _REPORT_EVERY_S seconds."""

    def __init__(self, say: Callable[[str], None], clock: Callable[[], float] = time.monotonic):
        self._say, self._clock = say, clock
        self.counts: dict[Reason, int] = {}
        self._reported: dict[Reason, tuple[float, int]] = {}

    def add(self, reason: Reason, address: str) -> None:
        """Count one refusal, and report it with those since the last report, if it is time."""
        count = self.counts[reason] = self.counts.get(reason, 0) + 1
        at, before = self._reported.get(reason, (float("-inf"), 0))
        if self._clock() - at < _REPORT_EVERY_S:
            return
        self._reported[reason] = (self._clock(), count)
        others = count - before - 1
        more = f" ({others} more since the last report)" if others else ""
        self._say(f"Refused a connection from {address}: {reason}{more}")
