"""A loop of its user's own, over a model that its user wrapped with peft; watched by StepWatch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import peft
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardwise.engine.loss import loss_of
from shardwise.engine.parallelize import parallelize
from shardwise.engine.sync import is_parallel, micro_batch
from shardwise.integrations.watch import StepWatch
from shardwise.pytorch.blocks import find_blocks
from shardwise.pytorch.private import plain_tensors
from shardwise.spec.strategy import Strategy
from tests.units.reduced import build, reduced

SPEC = reduced("llama", layers=3, hidden=128, heads=4, head_dim=32, ffn=352, vocab=256)
SEQ_LEN, MICRO_BATCH, STEPS = 64, 4, 5


def wrapped_by_peft(base: str, **settings: Any) -> nn.Module:
    """A Llama with adapters of peft alone: Shardwise has not seen it."""
    torch.manual_seed(0)
    device = str(torch.empty(0).device)
    module = build(SPEC, device=device, attention="sdpa").to(getattr(torch, base))
    config = {"r": 8, "target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM", **settings}
    model: nn.Module = peft.get_peft_model(module, peft.LoraConfig(**config))
    return model


def fp32_base() -> nn.Module:
    """The factory of a run.toml."""
    return wrapped_by_peft("float32")


def own_loop(case: dict[str, Any]) -> dict[str, Any]:
    """Train a few steps; what was predicted and measured, and what the optimizer holds."""
    model = wrapped_by_peft(case["base"], **case.get("lora", {}))
    accumulate = case.get("accumulate", 1)
    watch = StepWatch(
        model, seq_len=SEQ_LEN, micro_batch=MICRO_BATCH, accumulate=accumulate, clips=False
    )
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    model = _wrap(model, case["wrap"])
    # As people write it: all parameters, frozen ones too.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    watch.start(model, optimizer)
    ids = torch.randint(0, SPEC.vocab, (MICRO_BATCH, SEQ_LEN))
    before = {n: _bits(p) for n, p in model.named_parameters()}
    for _ in range(STEPS):
        with watch.step():
            for part in range(accumulate):
                _backward(model, ids, last=part == accumulate - 1)
            optimizer.step()
            optimizer.zero_grad()
    measured = watch.measured()
    assert measured is not None
    assert watch.predicted is not None
    states = [v for s in optimizer.state.values() for v in s.values() if v.ndim]
    names = {id(p): n.removeprefix("module.") for n, p in model.named_parameters()}
    return {
        "predicted": watch.predicted.to_dict(),
        "measured": measured.to_dict(),
        "parameter_bytes": sum(t.nbytes for p in model.parameters() for t in plain_tensors(p)),
        "state_bytes": sum(t.nbytes for state in states for t in plain_tensors(state)),
        "with_states": sorted(names[id(p)] for p in optimizer.state),
        "trained": trained,
        "frozen": sorted(frozen),
        "changed": sorted(
            n.removeprefix("module.") for n, p in model.named_parameters() if _bits(p) != before[n]
        ),
    }


def _wrap(model: nn.Module, how: str) -> nn.Module:
    if how == "ddp":
        return DistributedDataParallel(model)
    if how.startswith("fully_shard"):
        dtype = torch.bfloat16 if how == "fully_shard:bf16" else None
        settings = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype)}
        for block in find_blocks(model).values():
            fully_shard(block, **settings)  # type: ignore[call-overload]
        fully_shard(model, reshard_after_forward=False, **settings)  # type: ignore[call-overload]
        return model
    return parallelize(model, Strategy.read({"kind": how, "micro_batch": MICRO_BATCH}))


def _backward(model: nn.Module, ids: torch.Tensor, last: bool) -> None:
    if is_parallel(model):
        with micro_batch(model, last=last):
            loss_of(model)(ids, ids).backward()  # type: ignore[no-untyped-call]
    else:
        accumulates = isinstance(model, DistributedDataParallel) and not last
        with model.no_sync() if accumulates else nullcontext():  # type: ignore[operator]
            model(input_ids=ids, labels=ids).loss.backward()


def _bits(parameter: torch.Tensor) -> list[bytes]:
    return [one.detach().view(torch.uint8).numpy().tobytes() for one in plain_tensors(parameter)]
