"""What PyTorch's engine really does on 2 and 4 processes, against the prediction.

Collectives and state bytes to the byte; peak memory within 3 %.
"""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.spec.model import ModelSpec
from tests.distributed.workers import Workers
from tests.gate import in_gate
from tests.predict.toy import resolve
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.agreement import assert_agrees
from tests.distributed.engine_run import run_case

MODELS = {
    "gpt2": reduced("gpt2", layers=5, hidden=128, head_dim=32, ffn=512, vocab=1003),
    "llama": reduced("llama", layers=5, hidden=128, head_dim=32, ffn=344, vocab=1003),
    # The table outweighs the blocks; tied, its two gradients and their sum are alive together.
    "tied": reduced("gpt2", layers=3, hidden=128, head_dim=32, ffn=512, vocab=16001),
    "vocabulary": reduced("llama", layers=3, hidden=128, head_dim=32, ffn=344, vocab=16001),
}
Settings = dict[str, Any]
Example = tuple[str, str, Settings]
POWERSGD: Settings = {"compress": "powersgd", "powersgd_start": 2}

GRID: list[Example] = [
    (model, kind, {"accumulate": k, "grad_sync": sync, "param_dtype": dtype})
    for model in ("gpt2", "llama")
    for kind in ("ddp", "zero1", "zero2", "zero3")
    for k, sync in ((1, None), (3, "every"), (3, "last"))
    for dtype in ("fp32", "bf16")
]
TWO = [
    *GRID,
    ("llama", "zero3", {"blocks_per_unit": 2}),
    ("llama", "zero3", {"recompute": "full"}),
    ("llama", "zero3", {"accumulate": 2, "reshard_after_backward": False}),
    ("gpt2", "zero3", {"reduce_dtype": "bf16"}),
    ("gpt2", "ddp", {"ddp_bucket_mib": 2.0, "param_dtype": "fp32"}),
    ("gpt2", "ddp", {"compress": "bf16", "ddp_bucket_mib": 0.5}),
    ("llama", "ddp", {"compress": "fp16", "param_dtype": "fp32", "accumulate": 2}),
    ("llama", "ddp", {**POWERSGD, "ddp_bucket_mib": 0.5, "param_dtype": "fp32"}),
    ("gpt2", "ddp", {**POWERSGD, "accumulate": 2}),
    ("llama", "zero3", {"forward_prefetch": 2}),
    ("llama", "zero3", {"prefetch": 2, "forward_prefetch": 1}),
]
# Blocks recompute each by itself, however many are in a unit; shares count blocks.
TWO += [
    (model, "zero3", {"blocks_per_unit": blocks, "recompute": recompute, "micro_batch": 4})
    for model, blocks, recompute in (
        ("llama", 2, "full"),
        ("llama", 2, 0.5),
        ("llama", 3, "selective"),
        ("gpt2", 2, "selective"),
        ("gpt2", 3, 0.25),
    )
]
FOUR: list[Example] = [
    (model, "zero3:2", {"accumulate": k, "grad_sync": sync})
    for model in ("gpt2", "llama")
    for k, sync in ((1, None), (2, "every"), (2, "local"), (2, "last"))
]
FOUR += [
    ("llama", "zero2:2", {}),
    ("llama", "zero3", {}),
    ("llama", "zero3", {"reshard_after_forward": 2, "accumulate": 2}),
    ("gpt2", "ddp", {"accumulate": 2}),
    ("llama", "ddp", {"compress": "bf16", "micro_batch": 3}),
    ("gpt2", "ddp", {**POWERSGD, "powersgd_rank": 1, "ddp_bucket_mib": 1.0}),
]
# Where the peak is in another phase or made of other terms.
PEAKS: list[tuple[str, Settings]] = [
    ("zero3", {"param_dtype": "fp32"}),
    ("zero3", {}),
    ("zero2", {}),
    ("zero3", {"recompute": "full"}),
    ("zero3", {"accumulate": 2}),
    ("zero3", {"accumulate": 3, "grad_sync": "last"}),
    ("zero1", {"accumulate": 2}),
    ("zero2", {"accumulate": 3, "param_dtype": "fp32"}),
    ("ddp", {"param_dtype": "fp32"}),
    ("zero3", {"micro_batch": 4}),
    ("zero3", {"micro_batch": 4, "recompute": "full", "param_dtype": "fp32"}),
    ("zero3", {"blocks_per_unit": 2}),
]


# What test_pairwise.py has no value for; it combines either family with every pair of settings.
GATE = [(2, one) for one in TWO if "ddp_bucket_mib" in one[2] or one[2].get("blocks_per_unit") == 3]


@pytest.mark.parametrize(
    ("processes", "example"),
    in_gate(GATE, [*((2, one) for one in TWO), *((4, one) for one in FOUR)]),
    ids=lambda one: " ".join(map(str, one)) if isinstance(one, tuple) else str(one),
)
def test_the_engine_does_what_is_predicted(
    processes: int, example: Example, workers: Workers
) -> None:
    model, kind, settings = example
    assert_agrees(workers, MODELS[model], resolve(kind, processes, **settings), seq_len=64)


PEAK_CASES: list[Example] = [
    (model, kind, settings)
    for model in ("gpt2", "llama", "vocabulary", "tied")
    for kind, settings in PEAKS
    if model != "tied" or (kind in ("ddp", "zero3") and "micro_batch" not in settings)
]
PEAKS_IN_GATE: list[Example] = [
    ("vocabulary", "zero3", {"param_dtype": "fp32"}),
    ("vocabulary", "zero2", {"accumulate": 3, "param_dtype": "fp32"}),
    ("tied", "zero3", {"accumulate": 2}),
    ("tied", "ddp", {"param_dtype": "fp32"}),
]


@pytest.mark.parametrize(("model", "kind", "settings"), in_gate(PEAKS_IN_GATE, PEAK_CASES), ids=str)
def test_peak_memory(model: str, kind: str, settings: Settings, workers: Workers) -> None:
    seq_len = 16 if model == "tied" else 128
    assert_agrees(workers, MODELS[model], resolve(kind, 2, **settings), seq_len)


def test_the_measured_table_of_36_blocks(workers: Workers) -> None:
    spec: ModelSpec = reduced(
        "llama", layers=36, hidden=16, heads=2, kv_heads=1, head_dim=8, ffn=32, vocab=64
    )
    strategies = [
        resolve("zero3", 2),
        resolve("zero2", 2),
        resolve("zero3", 2, accumulate=2, grad_sync="last", reshard_after_backward=False),
    ]
    cases = [
        {
            "model": spec.model_dump(mode="json"),
            "strategy": strategy.model_dump(mode="json"),
            "seq_len": 8,
        }
        for strategy in strategies
    ]
    counts = [
        {key: calls for key, (calls, _) in ranks[0]["collectives"].items()}
        for ranks in workers.run(run_case, 2, cases)
    ]
    assert counts == [
        {"all_gather/2/shard": 73, "reduce_scatter/2/shard": 37},
        {"all_gather/2/shard": 37, "reduce_scatter/2/shard": 37},
        {"all_gather/2/shard": 73 + 36, "reduce_scatter/2/shard": 37},
    ]
