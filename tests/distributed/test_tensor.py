"""Tensor parallelism trains what one process does: six steps in fp64, against one process."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.workers import Workers

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.against_one import Alone, Settings

Example = tuple[int, str, Settings]


def example(processes: int, model: str, kind: str, **settings: Any) -> Example:
    return processes, model, {"kind": kind, "tensor": 2, **settings}


EXAMPLES = [
    # Layouts of shard x tensor: 1 x 2, 2 x 2, 1 x 4, 4 x 1.
    example(2, "llama", "zero3"),
    example(4, "llama", "zero3"),
    example(4, "four kv heads", "zero3", tensor=4),
    example(4, "llama", "zero3", tensor=1),
    example(4, "llama", "zero3", tensor_across_nodes=True, sequence_parallel=False),
    # Kinds, recompute and accumulation.
    example(4, "llama", "zero1", accumulate=2, recompute="selective"),
    example(4, "tied", "zero2", accumulate=2, recompute="full", sequence_parallel=False),
    example(4, "tied", "zero3", accumulate=2, recompute="selective"),
    example(4, "qwen3", "zero3", recompute="full", packed=True),
    example(4, "odd vocabulary", "zero3", split_root=True, recompute=0.5, meta=True),
    example(4, "tied", "ddp", accumulate=2, recompute="full"),
    example(4, "phi", "ddp", sequence_parallel=False, recompute="selective"),
    example(2, "gpt_neox", "zero3"),
    # Families.
    *(
        example(2, model, "zero3", sequence_parallel=sequence, packed=packed)
        for model in ("mistral", "qwen2", "qwen3", "gemma", "gemma3_text", "olmo", "phi")
        for sequence, packed in ((True, True), (False, False))
    ),
]
HYBRID = example(8, "llama", "zero3", shard=2, accumulate=2)


@pytest.fixture(scope="module")
def alone(workers: Workers) -> Alone:
    return Alone(workers)


@pytest.mark.parametrize(
    ("processes", "model", "settings"),
    [*EXAMPLES, pytest.param(*HYBRID, marks=pytest.mark.nightly)],
    ids=str,
)
def test_processes_train_what_one_does(
    processes: int, model: str, settings: Settings, alone: Alone
) -> None:
    alone.assert_same(processes, model, settings)
