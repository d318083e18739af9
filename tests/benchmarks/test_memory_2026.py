"""Published peaks with activation offload, planned with the strategy's own offload."""

from __future__ import annotations

import pytest

from benchmarks import published_2026
from benchmarks.memory_2026 import GIB
from shardwise.predict.estimate import reserved_interval
from shardwise.predict.memory import predict_memory


@pytest.mark.parametrize("name", ["prm-010", "prm-016", "prm-042", "prm-048"])
def test_a_planned_offload_takes_what_the_stack_published(name: str) -> None:
    """The stack keeps adapted weights in fp32 and makes the logits in 74 parts.

    It compiles, which the plan's offload does not, and keeps the inputs of its last five blocks.
    """
    raw = published_2026.published(name)
    row = published_2026.read_row(raw, compile=False, offload=("activations",))
    memory = predict_memory(row.units, row.columns)
    peak, pooled = (round(float(size[0])) for size in (memory.peak_bytes, memory.pooled_bytes))
    low, high = reserved_interval(peak, row.device, pooled, row.software.name)
    assert low / GIB <= float(raw["peak_mem_gb"]) <= high / GIB
