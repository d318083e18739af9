"""Train on several processes and on one, and compare what they learned."""

from __future__ import annotations

from typing import Any

from tests.distributed.tensor_run import train
from tests.distributed.workers import Workers
from tests.units.reduced import reduced

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


class Alone:
    """What one process trains, by model, data and initial weights."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers
        self._known: dict[tuple[Any, ...], dict[str, list[float]]] = {}

    def assert_same(self, processes: int, model: str, settings: Settings) -> None:
        """Parameters, losses and norms of six steps are those of one process."""
        [ranks] = self._workers.run(train, processes, [_case(model, settings)])
        for key, values in self._trained(model, settings).items():
            assert len(ranks[0][key]) == len(values) > 0
            worst = max(abs(a - b) for a, b in zip(ranks[0][key], values, strict=True))
            assert worst <= 1e-12, f"{key}: {worst}"

    def _trained(self, model: str, settings: Settings) -> dict[str, list[float]]:
        same = {key: settings.get(key, False) for key in ("packed", "meta")}
        key = (model, *same.values())
        if key not in self._known:
            case = _case(model, {"kind": "single", **same})
            [[self._known[key]]] = self._workers.run(train, 1, [case])
        return self._known[key]


def _case(model: str, settings: Settings) -> dict[str, Any]:
    strategy = {k: v for k, v in settings.items() if k not in ("packed", "meta")}
    return {
        "model": MODELS[model].model_dump(mode="json"),
        "strategy": {**FP64, **strategy},
        "clip": 0.5,
        "packed": settings.get("packed", False),
        "meta": settings.get("meta", False),
    }
