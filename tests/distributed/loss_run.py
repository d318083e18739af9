"""One step of a model with the plain and with the chunked loss: loss, gradients, peak memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import fully_shard
from transformers import AutoConfig, AutoModelForCausalLM

from shardwise.engine.loss import apply_chunked_loss, loss_of
from shardwise.engine.mesh import make_mesh, resolve_for_world, world
from shardwise.engine.parallelize import parallelize
from shardwise.engine.sync import micro_batch, store_strategy
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from tests.distributed.engine_run import measured_peak
from tests.distributed.parity_run import gradients_of
from tests.units.reduced import build

SEQUENCES, SEQ_LEN = 3, 17


def make(case: dict[str, Any], loss: str, dtype: torch.dtype) -> torch.nn.Module:
    """The model on the meta device if the case asks for it; its weights are the same either way."""
    strategy = Strategy.model_validate({**case["strategy"], "loss": loss})
    device = "meta" if case.get("meta") else "cpu"
    torch.manual_seed(0)
    if "config" in case:
        config = AutoConfig.for_model(**case["config"])
        module: Any = AutoModelForCausalLM.from_config(config)
    else:
        spec = ModelSpec.model_validate(case["model"])
        module = build(spec, device=device, attention=case.get("attention"))
    if case.get("head_unit"):
        return head_unit(module.to(dtype), strategy)
    return parallelize(module.to(dtype), strategy, device=torch.device("cpu"))


def head_unit(module: torch.nn.Module, strategy: Strategy) -> torch.nn.Module:
    """Sharded with the last norm and the head as one unit, as other stacks do."""
    strategy = resolve_for_world(strategy)
    mesh = make_mesh(strategy, "cpu")
    inner: Any = module.model
    if strategy.loss == "chunked":
        apply_chunked_loss(module, strategy.loss_chunks)
    for unit in (inner.embed_tokens, *inner.layers, [inner.norm, module.lm_head], module):
        fully_shard(unit, mesh=mesh)
    return store_strategy(module, strategy)


def step(case: dict[str, Any], loss: str) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss over all ranks, and the full gradient of every parameter."""
    dtype = torch.float64 if case["strategy"].get("param_dtype") == "fp64" else torch.float32
    module = make(case, loss, dtype)
    rank, size = world()
    data = torch.Generator().manual_seed(rank)
    accumulate = case["strategy"].get("accumulate", 1)
    loss_sum, total = loss_of(module), torch.zeros((), dtype=torch.float64)
    for index in range(accumulate):
        ids, targets = torch.randint(0, 101, (2, SEQUENCES, SEQ_LEN), generator=data)
        targets[0, : 4 + rank] = -100
        with micro_batch(module, last=index == accumulate - 1):
            part = loss_sum(ids, targets) / targets.numel()
            part.backward()
        total += part.detach()
    if size > 1:
        torch.distributed.all_reduce(total)
    return float(total) / size, gradients_of(module)


def compare(case: dict[str, Any]) -> dict[str, float]:
    """Relative errors of the chunked loss and of the worst gradient, against the plain loss."""
    expected, theirs = step(case, "plain")
    found, ours = step(case, "chunked")
    assert ours.keys() == theirs.keys()
    largest = max(gradient.abs().max().item() for gradient in theirs.values())
    worst = max((ours[name] - theirs[name]).abs().max().item() for name in theirs)
    return {"loss": abs(found / expected - 1), "gradient": worst / largest}


def peak(case: dict[str, Any]) -> int:
    """The most bytes of tensors that rank 0 holds during a step; 0 on other ranks."""
    module = make(case, case["strategy"]["loss"], torch.float32)
    ids = torch.randint(0, case["model"]["vocab"], (1, case["seq_len"]))
    loss_sum = loss_of(module)

    def run_step() -> None:
        loss_sum(ids, ids).backward()
        module.zero_grad(set_to_none=True)

    run_step()
    return measured_peak(run_step, case["strategy"]["kind"] == "ddp", 0)
