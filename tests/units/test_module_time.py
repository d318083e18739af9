"""The same model takes the same time, whether a preset or a module describes it.

Formulas count element-wise work by hand and a trace sees every operation; step times were fitted
with the formulas, so both must come to the same figures.
"""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from torch import nn

from shardwise.predict.configurations import Configurations
from shardwise.predict.time import predict_time
from shardwise.spec import catalogue
from shardwise.spec.lookup import find_cluster
from shardwise.units.decoder import decoder_units
from shardwise.units.module import module_units
from shardwise.units.unit import ModelUnits
from tests.predict.toy import resolve
from tests.units.reduced import build

CLUSTER = find_cluster("8xH100-SXM")
# Two layers of real width, and one model as it is.
SHAPES: dict[str, int | None] = {
    "llama-3.2-1b": None,
    "gpt2": 2,
    "qwen2.5-7b": 2,
    "qwen3-8b": 2,
    "mistral-7b": 2,
    "gemma-2b": 2,
    "mixtral-8x7b": 2,
    "phi-3-mini": 2,
}


def step_s(units: ModelUnits, **settings: Any) -> float:
    columns = Configurations.of([resolve("zero3", 8, **settings)])
    found = predict_time(units, columns, CLUSTER, "bf16", "adamw")
    assert found is not None
    return float(found.step_s[0])


@pytest.mark.parametrize("name", SHAPES)
def test_a_module_takes_as_long_as_its_preset(name: str) -> None:
    spec, layers = catalogue.model(name), SHAPES[name]
    spec = spec if layers is None else spec.but(layers=layers)
    preset = decoder_units(spec, 1024, "bf16")
    module = module_units(build(spec, attention="sdpa"), 1024, "bf16")
    for settings in ({"micro_batch": 8}, {"micro_batch": 2, "recompute": "full"}):
        assert step_s(module, **settings) == pytest.approx(step_s(preset, **settings), rel=0.02)


class Views(nn.Module):
    """A block that only looks at its input in other shapes, between two matmuls."""

    def __init__(self, views: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.views = views

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.up(x)
        for _ in range(self.views):
            x = x.view(*x.shape[:-1], 4, 16).transpose(-1, -2).transpose(-1, -2).flatten(-2)
        return self.down(torch.relu(x))


class Net(nn.Module):
    def __init__(self, views: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Views(views) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()

    def example_inputs(self, batch: int, seq_len: int) -> tuple[torch.Tensor, ...]:
        return (torch.zeros(batch, seq_len, 64, requires_grad=True),)


def test_views_run_no_kernels_and_move_nothing() -> None:
    for views in (0, 1, 5):
        stage = module_units(Net(views), 32, "fp32").blocks[1].stage
        # Two matmuls and a ReLU, which reads and writes 64 elements of 4 bytes.
        assert stage.kernels == 3
        assert stage.elementwise_bytes == 2 * 64 * 4
