"""Repeat an action in a background thread while training runs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger("shardwise")


class Periodic:
    """Calls `action` every `every_s` seconds in a thread, and once more when closed.

    Failures do not stop the training. The first one is logged as "Could not {what}: …".
    """

    def __init__(self, action: Callable[[], None], every_s: float, what: str) -> None:
        self._action, self._every_s, self._what = action, every_s, what
        self._failed = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name=what, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join()

    def _repeat(self) -> None:
        while not self._ended.wait(self._every_s):
            self._act()
        self._act()

    def _act(self) -> None:
        try:
            self._action()
        except Exception as error:  # stores raise what they like
            if not self._failed:
                log.warning("Could not %s: %s", self._what, error)
            self._failed = True
