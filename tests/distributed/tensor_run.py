"""Train six steps in fp64 under a strategy with tensor or context parallelism, with real ranks.

Every data rank takes its own part of one global batch, so that any mesh trains on the same data.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from shardwise.engine.counter import CollectiveCounter
from shardwise.engine.local_parts import divided_like, is_divided
from shardwise.engine.loss import IGNORED, loss_of
from shardwise.engine.mesh import data_rank, resolve_for_world, world
from shardwise.engine.parallelize import parallelize
from shardwise.engine.sync import micro_batch
from shardwise.engine.wrapped import axes_of
from shardwise.spec import ModelSpec, Strategy
from shardwise.step import by_operation
from shardwise.train.clip import clip_gradients
from shardwise.train.measure import norm_traffic
from tests.distributed.checkpoint_run import digest
from tests.distributed.parity_run import full
from tests.units.reduced import build

STEPS, GLOBAL_SEQUENCES, SEQ_LEN = 6, 8, 16


def batch_of(step: int, vocab: int, packed: bool) -> list[torch.Tensor]:
    """Ids, targets and positions of all sequences of a step; some targets do not count."""
    data = torch.Generator().manual_seed(step)
    ids, targets = torch.randint(0, vocab, (2, GLOBAL_SEQUENCES, SEQ_LEN), generator=data)
    targets[torch.rand(targets.shape, generator=data) < 0.2] = IGNORED
    positions = torch.arange(SEQ_LEN).repeat(GLOBAL_SEQUENCES, 1)
    if packed:
        # Each sequence is three examples, of lengths of its own.
        for row in range(GLOBAL_SEQUENCES):
            cuts = sorted((1 + torch.randperm(SEQ_LEN - 1, generator=data)[:2]).tolist())
            lengths = [cuts[0], cuts[1] - cuts[0], SEQ_LEN - cuts[1]]
            positions[row] = torch.cat([torch.arange(length) for length in lengths])
    return [ids, targets, positions]


def compute_norms_exactly(module: torch.nn.Module) -> None:
    """Let RMS norms compute in the dtype of their input; transformers' own always use fp32.

    That rounds differences of 1e-16 between processes up to 1e-8.
    """
    for norm in module.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = functools.partial(_rms_norm, norm)


def _rms_norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    gemma = hasattr(norm, "eps")
    epsilon = norm.eps if gemma else norm.variance_epsilon
    scaled = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)
    return scaled * (1.0 + norm.weight if gemma else norm.weight)


def digests_of_undivided(case: dict[str, Any]) -> list[str]:
    """Train a step with dropout; digests of the parameters that every process has whole."""
    spec = ModelSpec.model_validate(case["model"])
    torch.manual_seed(0)
    module = build(spec, device="cpu", attention="sdpa")
    model = parallelize(module, resolve_for_world(Strategy.model_validate(case["strategy"])))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = batch_of(0, spec.vocab, packed=False)[0]
    before = [digest(p) for p in model.parameters() if not is_divided(p)]
    with micro_batch(model):
        loss_of(model)(ids, ids).backward()
    optimizer.step()
    after = [digest(p) for p in model.parameters() if not is_divided(p)]
    assert not set(before) & set(after)
    return after


def traffic_of_norm(case: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Collectives of the gradient norm, counted and predicted."""
    spec = ModelSpec.model_validate(case["model"])
    strategy = resolve_for_world(Strategy.model_validate(case["strategy"]))
    model = parallelize(build(spec, device="cpu", attention="sdpa"), strategy)
    ids = batch_of(0, spec.vocab, packed=False)[0]
    with micro_batch(model):
        loss_of(model)(ids, ids).backward()
    with CollectiveCounter(axes_of(model)) as counter:
        clip_gradients(model.parameters(), 1.0)
    predicted = by_operation(norm_traffic(strategy, model))
    return (
        {"/".join(map(str, key)): tuple(count) for key, count in counter.counts.items()},
        {"/".join(map(str, key)): both for key, both in predicted.items()},
    )


def train(case: dict[str, Any]) -> dict[str, Any]:
    """Every parameter after the last step, in one list, and the losses; empty but on rank 0."""
    spec = ModelSpec.model_validate(case["model"])
    strategy = resolve_for_world(Strategy.model_validate(case["strategy"]))
    torch.manual_seed(0)
    device = "meta" if case.get("meta") else "cpu"
    module = build(spec, device=device, attention="sdpa").double()
    compute_norms_exactly(module)
    model = parallelize(module, strategy, device=torch.device("cpu"))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    loss_sum, losses = loss_of(model), []
    mesh = strategy.mesh
    for step in range(STEPS):
        whole = batch_of(step, spec.vocab, case.get("packed", False))
        tokens = int((whole[1] != IGNORED).sum())
        mine = [part.chunk(mesh.data_parallel)[data_rank(strategy)] for part in whole]
        total = torch.zeros((), dtype=torch.float64)
        micro = zip(*(part.chunk(strategy.accumulate) for part in mine), strict=True)
        for index, (ids, targets, positions) in enumerate(micro):
            with micro_batch(model, last=index == strategy.accumulate - 1):
                packed = positions if case.get("packed") else None
                scale = mesh.replicate * mesh.states / tokens
                loss = loss_sum(ids, targets, packed) * scale
                loss.backward()
            total += loss.detach()
        norm = clip_gradients(trained, case["clip"])
        optimizer.step()
        optimizer.zero_grad(set_to_none=strategy.kind != "ddp")
        if world()[1] > 1:
            torch.distributed.all_reduce(total)
        losses += [float(total) / world()[1], float(norm)]
    parameters = [full(divided_like(p, p.detach())).flatten() for p in model.parameters()]
    return {} if world()[0] else {"parameters": torch.cat(parameters).tolist(), "losses": losses}
