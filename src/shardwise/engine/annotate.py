"""Names in traces for what the loop does."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch.autograd import profiler

DATA = "shardwise::data"
SYNC, NO_SYNC = "shardwise::micro_batch (sync)", "shardwise::micro_batch (no sync)"


def annotated(name: str) -> AbstractContextManager[object]:
    """Name what happens inside, while a profiler runs; else as good as nothing."""
    # `record_function` alone takes microseconds even where nobody records.
    if not profiler._is_profiler_enabled:
        return nullcontext()
    return profiler.record_function(name)
