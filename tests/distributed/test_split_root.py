"""Embedding and head in units of their own: the engine against the prediction."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.workers import Workers
from tests.gate import first_in_gate
from tests.predict.toy import resolve
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.agreement import assert_agrees

# A vocabulary whose tables are larger than a block.
MODEL = reduced("llama", layers=4, hidden=128, head_dim=32, ffn=344, vocab=4003)
# The first is what test_pairwise_units.py does not combine with it.
CASES: list[tuple[str, int, dict[str, Any]]] = [
    ("zero3", 4, {"reshard_after_forward": 2, "prefetch": 2}),
    ("zero3", 2, {}),
    ("zero3", 4, {"recompute": "full", "accumulate": 2}),
    ("zero3", 2, {"accumulate": 3, "reshard_after_backward": False}),
    ("zero3:2", 4, {"accumulate": 2, "grad_sync": "last"}),
    ("zero3", 2, {"prefetch": 0, "forward_prefetch": 1, "param_dtype": "fp32"}),
    ("zero2", 2, {"blocks_per_unit": 3}),
    ("zero1", 2, {"accumulate": 2}),
]


@pytest.mark.parametrize(("kind", "processes", "settings"), first_in_gate(1, CASES))
def test_split_root(kind: str, processes: int, settings: dict[str, Any], workers: Workers) -> None:
    strategy = resolve(kind, processes, split_root=True, **settings)
    assert_agrees(workers, MODEL, strategy, seq_len=64)
