"""Imported last in the process that ranks are forked from, so that it ends with its launcher.

Otherwise Python would first free all imported modules, which takes seconds on a busy machine.
"""

from __future__ import annotations

import atexit
import os


def _end(process: int) -> None:
    """Exit at once, but only in the given process."""
    if os.getpid() == process:  # ranks inherit this
        os._exit(0)


atexit.register(_end, os.getpid())
