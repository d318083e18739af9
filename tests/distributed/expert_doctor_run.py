"""Mixtures of experts and code that shards them, sound and with one mistake each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from shardwise.engine.expert import ExpertParallel, stacked_experts
from shardwise.engine.mesh import EXPERT_SHARD, resolve_for_world
from shardwise.engine.parallelize import parallelize
from shardwise.spec.lookup import ModuleRef
from shardwise.spec.strategy import Strategy
from shardwise.trials.doctor.expert_checks import expert_checks
from tests.distributed.expert_models import EXPERTS, VOCAB, WIDTH, build
from tests.distributed.expert_run import FP64

HERE = "tests.distributed.expert_doctor_run"
# ---- models --------------------------------------------------------------------------------------


def mixtral() -> nn.Module:
    return build("mixtral", device="cpu")


def qwen3_moe() -> nn.Module:
    return build("qwen3_moe", device="cpu")


def olmoe() -> nn.Module:
    return build("olmoe", device="cpu")


def deepseek_v3() -> nn.Module:
    return build("deepseek_v3", device="cpu")


def gpt_oss() -> nn.Module:
    return build("gpt_oss", device="cpu")


def frozen_router() -> nn.Module:
    model: Any = mixtral()
    model.model.layers[1].mlp.gate.weight.requires_grad_(False)
    return model


def adapted() -> nn.Module:
    """Adapters in linear layers, which stacked experts are not."""
    import peft

    return peft.get_peft_model(
        qwen3_moe(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    )


class Experts(nn.Module):
    """Experts as torchtitan has them: called with tokens in their order, and how many each has."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = EXPERTS
        self.w1 = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / 8)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / 8)

    def forward(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w2))
        parts = tokens.split(counts.tolist())
        done = [(part @ a.T).relu() @ b.T for part, a, b in zip(parts, up, down, strict=True)]
        return torch.cat(done)


class Mixture(nn.Module):
    """A block of top-1 routing."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()
        self.detached = detached

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        scores = self.gate(tokens).softmax(-1)
        weight, chosen = (scores.detach() if self.detached else scores).max(-1)
        order = chosen.argsort(stable=True)
        done = self.experts(tokens[order], chosen.bincount(minlength=EXPERTS))
        return x + (done[order.argsort()] * weight.unsqueeze(-1)).view_as(x)


class Own(nn.Module):
    """A model that is not of transformers."""

    def __init__(self, detached: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Mixture(detached) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def detached_router() -> nn.Module:
    return Own(detached=True)


# ---- code that shards ----------------------------------------------------------------------------


def _parallel(module: nn.Module, **settings: Any) -> nn.Module:
    strategy = resolve_for_world(Strategy.read({"kind": "zero3", **FP64, **settings}))
    return parallelize(module, strategy)


def with_replicas(module: nn.Module) -> nn.Module:
    return _parallel(module, shard=2, expert=2)


def sharded(module: Any) -> Any:
    """Plain fully_shard, without expert parallelism."""
    for layer in module.layers:
        fully_shard(layer)
    return fully_shard(module)


def divided_twice(module: nn.Module) -> nn.Module:
    """A divide factor for experts whose group has one device, which torch 2.13 applies twice."""
    model = _parallel(module, expert=4)
    for _, experts in stacked_experts(model):
        experts.set_all_reduce_hook(lambda _: None)  # type: ignore[operator]
        experts.set_gradient_divide_factor(4.0)  # type: ignore[operator]
        experts.set_force_sum_reduction_for_comms(True)  # type: ignore[operator]
    return model


def unreduced(module: Any) -> Any:
    """Experts on a mesh without replicas, all else on one with them."""
    strategy = resolve_for_world(Strategy.read({"kind": "zero3", "shard": 2, "expert": 2}))
    expert = ExpertParallel(module, strategy, "cpu")
    dense = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for layer in module.model.layers:
        for _, experts in stacked_experts(layer):
            expert._divide(experts)
            fully_shard(experts, mesh=expert.mesh[EXPERT_SHARD])
            experts.set_all_reduce_hook(lambda gradient: gradient.div_(2))  # type: ignore[operator]
        fully_shard(layer, mesh=dense)
    return fully_shard(module, mesh=dense)


def with_partial_norm(module: nn.Module) -> tuple[nn.Module, Any]:
    """A norm of what is on one mesh: experts are on another."""

    def norm(parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        gradients: list[Any] = [p.grad for p in parameters if p.grad is not None]
        first = gradients[0].device_mesh
        return get_total_norm([g for g in gradients if g.device_mesh == first])

    return with_replicas(module), norm


def diagnose(case: dict[str, str]) -> dict[str, bool | None]:
    """The checks of a model that a function shards, by name."""
    model = ModuleRef.read({"factory": f"{HERE}:{case['model']}"}, where="model")
    return {
        check.name: check.passed for check in expert_checks(model, f"{HERE}:{case['sharding']}")
    }
