"""Disable garbage collection while an index is created or read.

An index is many objects. Each thousand of them would start a collection, and some collections visit
all objects of torch: that takes longer than the index.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Context manager that disables the garbage collector inside the `with` block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
