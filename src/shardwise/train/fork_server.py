"""Imported last in the process that ranks are forked from: it ends as soon as its launcher does.

Python would first free all that was imported, which takes seconds on a busy machine.
"""

from __future__ import annotations

import atexit
import os


def _end(process: int) -> None:
    if os.getpid() == process:  # ranks inherit this
        os._exit(0)


atexit.register(_end, os.getpid())
