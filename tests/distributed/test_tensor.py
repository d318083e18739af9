"""Tensor parallelism trains what one process does: six steps in fp64, against one process."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.spec import ModelSpec
from tests.distributed.workers import Workers
from tests.units.reduced import reduced

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.tensor_run import train

FP64 = {"param_dtype": "fp64", "reduce_dtype": "fp64", "master_dtype": "fp64"}
SMALL = {"layers": 3, "hidden": 64, "heads": 4, "head_dim": 16, "ffn": 96, "vocab": 104}
MODELS = {
    "llama": reduced("llama", **SMALL),
    "tied": reduced("llama", **SMALL, tied=True),
    "four kv heads": reduced("llama", **{**SMALL, "kv_heads": 4}),
    # Not divisible: the last process has fewer rows of the vocabulary.
    "odd vocabulary": reduced("llama", **{**SMALL, "vocab": 101}),
    "mistral": reduced("mistral", **SMALL, window=5),
    "qwen2": reduced("qwen2", **SMALL),
    "qwen3": reduced("qwen3", **SMALL),
    "gemma": reduced("gemma", **SMALL, kv_heads=2),
    "gemma3_text": reduced("gemma3_text", **{**SMALL, "window": 5}),
    "olmo": reduced("olmo", **SMALL),
    "gpt_neox": reduced("gpt_neox", **SMALL),
    # Biases: those of row-wise layers must be added once.
    "phi": reduced("phi", **SMALL),
}
Settings = dict[str, Any]
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


class Alone:
    """What one process trains, by model, data and initial weights."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._known: dict[tuple[Any, ...], dict[str, list[float]]] = {}

    def trained(self, model: str, settings: Settings) -> dict[str, list[float]]:
        same = {key: settings.get(key, False) for key in ("packed", "meta")}
        key = (model, *same.values())
        if key not in self._known:
            case = case_of(MODELS[model], {"kind": "single", **same})
            [[self._known[key]]] = self._workers.run(train, 1, [case])
        return self._known[key]


@pytest.fixture(scope="module")
def alone(workers: Workers) -> Alone:
    return Alone(workers)


def case_of(spec: ModelSpec, settings: Settings) -> dict[str, Any]:
    strategy = {k: v for k, v in settings.items() if k not in ("packed", "meta")}
    return {
        "model": spec.model_dump(mode="json"),
        "strategy": {**FP64, **strategy},
        "clip": 0.5,
        "packed": settings.get("packed", False),
        "meta": settings.get("meta", False),
    }


def assert_same(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    for key, values in expected.items():
        assert len(found[key]) == len(values) > 0
        worst = max(abs(a - b) for a, b in zip(found[key], values, strict=True))
        assert worst <= 1e-12, f"{key}: {worst}"


@pytest.mark.parametrize(
    ("processes", "model", "settings"),
    [*EXAMPLES, pytest.param(*HYBRID, marks=pytest.mark.nightly)],
    ids=str,
)
def test_processes_train_what_one_does(
    processes: int, model: str, settings: Settings, workers: Workers, alone: Alone
) -> None:
    [ranks] = workers.run(train, processes, [case_of(MODELS[model], settings)])
    assert_same(ranks[0], alone.trained(model, settings))
