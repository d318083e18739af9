"""Random questions, and the options of the command line that ask the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NamedTuple

from shardwise.spec import catalogue
from shardwise.spec.optimizer import OPTIMIZERS

# Options whose name differs from the question's.
_NAMES = {"for_stack": "for"}
_FLAGS = ("exact_batch", "compile")
_ADAPTERS = ("lora:8", "qlora:16", "dora:32", "lora:16:q_proj,v_proj")
# What people mistype.
_WRONG = {
    "model": ("llama-3-8", "gpt5", ""),
    "cluster": ("8xH1000", "0xH100-SXM", "8 x H100", "4x8xH100-SXM@0Gbps", "12xH100-SXM"),
    "seq_len": ("0", "-4", "many", "1e99"),
    "global_batch": ("0", "4Q", "17"),
    "adapter": ("lora", "lora:0", "rola:8"),
    "precision": ("bf17",),
    "tokens": ("0", "lots"),
    "price": ("-1", "H100-SXM"),
}


class Asked(NamedTuple):
    question: dict[str, Any]

    @property
    def words(self) -> list[str]:
        """The command that asks the same."""
        words = ["plan"]
        for name, value in self.question.items():
            option = f"--{_NAMES.get(name, name).replace('_', '-')}"
            if name in _FLAGS:
                words += [option] if value else [f"--no-{name}"]
            elif name != "ask":
                words += [option, f"{value:g}" if isinstance(value, float) else str(value)]
        return [*words, "--json"]


def questions(count: int, seed: int) -> Iterator[Asked]:
    """Every model of the catalogue in turn, on random clusters; one of five is mistyped."""
    rng = random.Random(seed)
    models = catalogue.model_names()
    for number in range(count):
        question = _question(rng, models[number % len(models)])
        if rng.random() < 0.2:
            name = rng.choice(list(_WRONG))
            question[name] = rng.choice(_WRONG[name])
        yield Asked(question)


def _question(rng: random.Random, model: str) -> dict[str, Any]:
    device = rng.choice(list(catalogue.devices()))
    nodes = rng.choice((1, 1, 2, 4, 16, 64))
    network = f"@{rng.choice((50, 100, 400, 800))}Gbps" if nodes > 1 else ""
    question: dict[str, Any] = {
        "ask": "plan",
        "model": model,
        "cluster": f"{nodes}x{rng.choice((1, 2, 4, 8))}x{device}{network}",
    }
    choices: dict[str, Any] = {
        "seq_len": (1024, 2048, 8192, "4Ki"),
        "global_batch": ("512Ki", "1Mi", 4_000_000),
        "adapter": _ADAPTERS,
        "optimizer": OPTIMIZERS,
        "precision": ("bf16", "fp16", "fp32"),
        "objective": ("throughput", "memory", "money"),
        "exact_batch": (True,),
        "compile": (True,),
        "tokens": ("10B", "1T"),
        "price": (1.5, 2.25),
        "for_stack": ("accelerate", "deepspeed", "trainer"),
    }
    for name, values in choices.items():
        if rng.random() < 0.25:
            question[name] = rng.choice(values)
    return question
