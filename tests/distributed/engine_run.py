"""Measure a training step on the engine: collectives, state bytes and peak memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.counter import CollectiveCounter
from shardwise.engine.expert import stacked_experts
from shardwise.engine.ledger import LiveBytes
from shardwise.engine.loss import loss_of
from shardwise.engine.offload import activation_bytes_on_host
from shardwise.engine.parallelize import parallelize
from shardwise.engine.sync import micro_batch, strategy_of
from shardwise.engine.wrapped import axes_of
from shardwise.pytorch.adapted import adapt
from shardwise.pytorch.private import plain_tensors
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import TrainSettings
from shardwise.trainer.optimizer import clear_gradients, make_optimizer
from shardwise.units.module import TORCH_DTYPES
from tests.units.reduced import build


def freeze(module: torch.nn.Module, names: Iterable[str]) -> None:
    """Freeze the parameters whose name contains one of these."""
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(not any(part in name for part in names))


def route_evenly(module: torch.nn.Module) -> None:
    """Choose the experts of tokens in turn, so that all devices get equally many."""

    def in_turn(experts: Any, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        tokens, chosen, weights = args
        count = experts.num_experts * degree
        return tokens, (torch.arange(chosen.numel()) % count).view(chosen.shape), weights

    degree = strategy_of(module).expert
    for _, experts in stacked_experts(module):
        experts.register_forward_pre_hook(in_turn)


def step(module: torch.nn.Module, optimizer: Any, ids: torch.Tensor, strategy: Strategy) -> None:
    for index in range(strategy.accumulate):
        with micro_batch(module, last=index == strategy.accumulate - 1):
            loss_of(module)(ids, ids).backward()
    optimizer.step()
    clear_gradients(module, optimizer)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    spec = ModelSpec.model_validate(case["model"])
    strategy = Strategy.model_validate(case["strategy"])
    torch.manual_seed(0)
    built = build(spec, device="cpu", attention="sdpa")
    built.to(TORCH_DTYPES[strategy.kept_dtype])
    freeze(built, case.get("frozen", ()))
    if spec.adapter is not None:
        adapt(built, spec.adapter)
    module = parallelize(built, strategy)
    if strategy.expert > 1:
        route_evenly(module)
    trained = [p for p in module.parameters() if p.requires_grad]
    name = case.get("optimizer", "adamw")
    optimizer = (
        torch.optim.AdamW(trained, lr=1e-3, fused=True)
        if name == "adamw" and strategy.states is None and not strategy.offload
        else make_optimizer(module, name, TrainSettings(learning_rate=1e-3))
    )
    ids = torch.randint(0, spec.vocab, (strategy.micro_batch, case["seq_len"]))
    # Lazy initialisation and optimizer states; PowerSGD begins.
    for _ in range(strategy.powersgd_start + 1 if strategy.compress == "powersgd" else 1):
        step(module, optimizer, ids, strategy)
    counter = CollectiveCounter(axes_of(module))

    def counted_step() -> None:
        counter.counts.clear()
        with counter:
            step(module, optimizer, ids, strategy)

    enough = case.get("enough_bytes")
    if enough is None:
        counted_step()
        peak = 0
    else:
        # DDP's buckets outlive steps, and are first seen in one that is followed.
        peak = measured_peak(counted_step, strategy.kind == "ddp", enough)
    states = [
        plain
        for state in optimizer.state.values()
        for v in state.values()
        if isinstance(v, torch.Tensor) and v.numel() > 1
        for plain in plain_tensors(v)
    ]
    return {
        "collectives": {
            f"{op}/{size}/{axis}": tuple(n) for (op, size, axis), n in counter.counts.items()
        },
        "parameter_bytes": sum(one.nbytes for p in module.parameters() for one in plain_tensors(p)),
        "optimizer_bytes": sum(s.nbytes for s in states),
        "peak_bytes": peak,
        "host_activation_bytes": DeviceBytes.most_on_host,
        "host_gradient_bytes": sum(
            plain.nbytes
            for state in optimizer.state.values()
            for plain in plain_tensors(state["master"] if "master" in state else torch.empty(0))
        ),
    }


class DeviceBytes(LiveBytes):
    """Bytes of live tensors without activations in host memory, of which the most is kept."""

    # Since the process started to measure.
    most_on_host = 0

    def _sum_now(self) -> int:
        on_host = activation_bytes_on_host()
        DeviceBytes.most_on_host = max(DeviceBytes.most_on_host, on_host)
        return super()._sum_now() - on_host

    def current(self) -> dict[str, int]:
        return {**super().current(), "on host": -activation_bytes_on_host()}


def measured_peak(run_step: Callable[[], None], runs_before: bool, enough: int) -> int:
    """The most bytes of tensors that rank 0 held during a step; 0 on other ranks.

    The lowest of three steps, or the first that is not above `enough`: when the machine is busy,
    Gloo's threads let go of their tensors late, which can only add to a peak.
    """
    if dist.get_rank():
        if runs_before:
            run_step()
        while agreed(False):
            run_step()
        return 0
    gc.collect()
    DeviceBytes.most_on_host = 0
    peaks: list[int] = []
    with DeviceBytes() as live:
        if runs_before:
            run_step()
        while agreed(not peaks or (len(peaks) < 3 and min(peaks) > enough)):
            live.reset()
            run_step()
            peaks.append(live.peak_bytes)
    return min(peaks)


def agreed(wanted: bool) -> bool:
    """What rank 0 wants, on every rank."""
    told = torch.tensor(float(wanted))
    dist.broadcast(told, src=0)
    return bool(told)
