"""Ranges in profiler traces that mark data loading and micro-batches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd.profiler import record_function

from shardwise.engine.torch_private import is_profiling

DATA = "shardwise::data"
SYNC, NO_SYNC = "shardwise::micro_batch (sync)", "shardwise::micro_batch (no sync)"


def annotated(name: str) -> AbstractContextManager[object]:
    """Mark a range in the trace while a profiler records; otherwise do nothing."""
    return record_function(name) if is_profiling() else nullcontext()
