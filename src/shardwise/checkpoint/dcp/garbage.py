"""No garbage collection while an index is created or read.

An index is many objects. Each thousand of them would start a collection, and some of those look at
all objects of torch: that takes longer than the index.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable the garbage collector in the body."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
