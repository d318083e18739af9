"""Ranges in profiler traces that mark data loading and micro-batches."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd.profiler import record_function

from shardwise.pytorch.private import is_profiling

DATA = "shardwise::data"
SYNC, NO_SYNC = "shardwise::micro_batch (sync)", "shardwise::micro_batch (no sync)"


def annotated(name: str) -> AbstractContextManager[object]:
    """A context that marks a range in the trace of a running profiler; otherwise does nothing."""
    return record_function(name) if is_profiling() else nullcontext()
