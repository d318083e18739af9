"""Measure the overhead of a collective inside a block: DTensor's work in Python around it.

A small model runs with the engine's tensor parallelism, and without. Its tensors are tiny, so the
difference is the cost of every collective, whatever its size.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import silu

from shardwise.engine.tensor import TensorParallel
from shardwise.spec.strategy import Strategy
from shardwise.trials.calibrate.machine.collectives import Group
from shardwise.trials.calibrate.machine.timing import timed

LAYERS = 2
# An all-gather and a reduce-scatter, in the forward and in the backward.
EXCHANGES_PER_LAYER = 4
WIDTH_PER_PROCESS, SEQ_LEN_PER_PROCESS = 16, 4


class _FeedForward(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(width, width, bias=False) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.down(silu(self.gate(hidden)) * self.up(hidden))
        return made


class _Layer(nn.Module):
    """A feed-forward block with pre-norm and residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(width), _FeedForward(width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.mlp(self.norm(hidden))
        return hidden + made


class _Layers(nn.Sequential):
    tp_plan: ClassVar[dict[str, str]] = {
        "*.mlp.gate": "colwise",
        "*.mlp.up": "colwise",
        "*.mlp.down": "rowwise",
    }


def measure_exchange(device: torch.device, group: Group) -> float:
    """Seconds of one tiny collective inside a block, with the overhead around it."""
    whole_s = _pass_s(device, group, divided=False)
    divided_s = _pass_s(device, group, divided=True)
    return max(0.0, divided_s - whole_s) / (LAYERS * EXCHANGES_PER_LAYER)


def _pass_s(device: torch.device, group: Group, *, divided: bool) -> float:
    """Seconds of a forward and a backward; with tensor parallelism if `divided`."""
    width, length = WIDTH_PER_PROCESS * group.members, SEQ_LEN_PER_PROCESS
    model = _Layers(*(_Layer(width) for _ in range(LAYERS))).to(device)
    if divided:
        mesh = DeviceMesh.from_group(group.handle, device.type)
        strategy = Strategy(kind="zero3", tensor=group.members, param_dtype="fp32")
        TensorParallel(model, strategy, mesh).unit([model])
    else:
        length *= group.members
    hidden = torch.ones(1, length, width, device=device, requires_grad=True)
    return timed(lambda: model(hidden).sum().backward(), device).median_s
