"""Models of which only a part is trained: the engine against the prediction.

Frozen parameters are gathered like all others; gradients, reductions and optimizer states are of
the rest. Below the first trained parameter there is no backward at all.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.workers import Workers
from tests.gate import in_gate
from tests.predict.toy import resolve
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.agreement import assert_agrees

MODEL = reduced("llama", layers=4, hidden=128, head_dim=32, ffn=344, vocab=503)
SUBSETS: dict[str, tuple[str, ...]] = {
    "no mlp": ("mlp",),
    "only norms and head": ("proj", "embed"),
    "no embedding": ("embed",),
    "last two blocks": ("embed", "layers.0.", "layers.1."),
    "every other block": ("layers.0.", "layers.2."),
    "only the head": ("embed", "layers.", "model.norm"),
}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("no mlp", "zero3", {}),
    ("no mlp", "zero2", {"accumulate": 2}),
    ("no mlp", "ddp", {"param_dtype": "fp32"}),
    ("only norms and head", "zero3", {"recompute": "full"}),
    ("only norms and head", "zero2", {}),
    ("no embedding", "zero3", {"accumulate": 2, "grad_sync": "last"}),
    ("no embedding", "ddp", {"accumulate": 2}),
    ("last two blocks", "zero3", {}),
    ("last two blocks", "zero2", {}),
    ("last two blocks", "zero3", {"prefetch": 0, "accumulate": 2}),
    ("every other block", "zero3", {"micro_batch": 2}),
    ("every other block", "zero1", {"accumulate": 2}),
    ("only the head", "zero3", {}),
]


# test_pairwise_units.py combines two of the subsets with every pair of settings.
GATE = [CASES[number] for number in (3, 6, 11, 12)]


@pytest.mark.parametrize(("subset", "kind", "settings"), in_gate(GATE, CASES))
def test_what_is_frozen_has_no_gradient(
    subset: str, kind: str, settings: dict[str, Any], workers: Workers
) -> None:
    strategy = resolve(kind, 2, **settings)
    assert_agrees(workers, MODEL, strategy, seq_len=64, frozen=SUBSETS[subset])
