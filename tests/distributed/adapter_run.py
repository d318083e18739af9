"""Steps of adapted models: loss and full gradients, to compare kinds with one process."""

from __future__ import annotations

from typing import Any

import torch

from shardwise.engine.loss import loss_of
from shardwise.engine.mesh import resolve_for_world, world
from shardwise.engine.parallelize import parallelize
from shardwise.engine.sync import micro_batch
from shardwise.pytorch.adapted import adapt
from shardwise.pytorch.build import build_module
from shardwise.pytorch.private import plain_tensors
from shardwise.spec.adapter import Adapter, read_adapter
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from tests.distributed.parity_run import gradients_of
from tests.units.reduced import build

SEQUENCES, SEQ_LEN = 8, 16


def module_of(case: dict[str, Any]) -> torch.nn.Module:
    """The adapted model: on the meta device, or real with adapters that change its output."""
    spec = ModelSpec.model_validate(case["model"])
    adapter = read_adapter(case["adapter"])
    if case.get("meta"):
        with torch.device("meta"):
            return build_module(spec.but(adapter=adapter))
    torch.manual_seed(0)
    module = build(spec, device="cpu", attention="sdpa")
    return with_random_adapters(module.to(getattr(torch, case.get("dtype", "float64"))), adapter)


def with_random_adapters(module: torch.nn.Module, adapter: Adapter) -> torch.nn.Module:
    """peft starts with lora_B = 0, which would leave lora_A without a gradient."""
    module = adapt(module, adapter)
    for name, parameter in module.named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.05)
    return module


def step(case: dict[str, Any]) -> dict[str, Any]:
    """The loss of the global batch, and the full gradients by name; those on rank 0 only."""
    module = module_of(case)
    strategy = resolve_for_world(Strategy.model_validate(case["strategy"]))
    model = parallelize(module, strategy, device=torch.device("cpu"), seed=3)
    rank, size = world()
    ids, targets = torch.randint(
        0, case["model"]["vocab"], (2, SEQUENCES, SEQ_LEN),
        generator=torch.Generator().manual_seed(1),
    )  # fmt: skip
    loss_sum, total = loss_of(model), torch.zeros((), dtype=torch.float64)
    mine = list(zip(*(part.chunk(size)[rank].chunk(strategy.accumulate) for part in (ids, targets)),
                    strict=True))  # fmt: skip
    for index, (inputs, labels) in enumerate(mine):
        with micro_batch(model, last=index == len(mine) - 1):
            part = loss_sum(inputs, labels) / (labels.numel() * len(mine))
            part.backward()
        total += part.detach()
    if size > 1:
        torch.distributed.all_reduce(total)
    gradients = gradients_of(model)
    trained = [n.removeprefix("module.") for n, p in model.named_parameters() if p.requires_grad]
    return {
        "loss": float(total) / size,
        "trained": trained,
        "gradients": gradients if rank == 0 else {},
    }


def local_losses(case: dict[str, Any]) -> list[float]:
    """The loss of every sequence of the batch, each on the rank that has it, in order."""
    module = module_of(case)
    model = parallelize(
        module, Strategy.model_validate(case["strategy"]), device=torch.device("cpu"), seed=3
    )
    matrices = [p for n, p in model.named_parameters() if n.endswith("proj.base_layer.weight")]
    assert all(len(list(plain_tensors(weight))) > 1 for weight in matrices), "not quantised"
    rank, size = world()
    ids = torch.randint(0, case["model"]["vocab"], (SEQUENCES, 1, SEQ_LEN),
                        generator=torch.Generator().manual_seed(1))  # fmt: skip
    loss_sum = loss_of(model)
    losses = []
    for one in ids.chunk(size)[rank]:
        loss = loss_sum(one, one)
        loss.backward()
        losses.append(float(loss.detach()))
    gathered: list[Any] = [losses]
    if size > 1:
        gathered = [None] * size
        torch.distributed.all_gather_object(gathered, losses)
    return [loss for part in gathered for loss in part]
