"""Ranges in profiler traces that mark data loading and micro-batches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

DATA = "shardwise::data"
SYNC, NO_SYNC = "shardwise::micro_batch (sync)", "shardwise::micro_batch (no sync)"


def annotated(name: str) -> AbstractContextManager[object]:
    """Mark a range in the trace while a profiler records; otherwise do nothing."""
    # `record_function` alone takes microseconds even without a profiler.
    if not profiler._is_profiler_enabled:
        return nullcontext()
    return profiler.record_function(name)
