"""Parity: in fp64, every strategy must train the same parameters as one unsharded device.

Every data rank takes its own part of one global batch, so that any mesh trains on the same data.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.spec.mesh import Mesh
from shardwise.spec.model import ModelSpec
from shardwise.spec.strategy import Strategy
from shardwise.trials.accept.line import CheckFailedError, Line, judge, not_run

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwise.trials.accept.bench import Bench

STEPS, SEQ_LEN = 6, 16
FP64 = {"param_dtype": "fp64", "reduce_dtype": "fp64", "master_dtype": "fp64"}
# Largest difference of a parameter after all steps. Rounding gives 1e-16; a gradient that is
# missing or counted twice moves a parameter by the learning rate, 1e-3.
TOLERANCE = 1e-10
SMALL: dict[str, Any] = {
    "family": "llama", "layers": 3, "hidden": 64, "heads": 4, "head_dim": 16, "kv_heads": 2,
    "ffn": 96, "vocab": 104, "max_positions": 512,
}  # fmt: skip


class Case(NamedTuple):
    """A strategy to compare. If it fixes the size of groups, it needs a multiple of `devices`."""

    name: str
    strategy: Mapping[str, Any]
    devices: int = 2


CASES = (
    Case("ddp", {"kind": "ddp"}),
    Case("zero1, accumulate 2", {"kind": "zero1", "accumulate": 2}),
    Case("zero2", {"kind": "zero2"}),
    Case("zero3", {"kind": "zero3"}),
    Case("zero3, full recompute", {"kind": "zero3", "recompute": "full"}),
    Case("zero3, selective recompute", {"kind": "zero3", "recompute": "selective"}),
    Case("zero3, accumulate 2, reduce last",
         {"kind": "zero3", "accumulate": 2, "grad_sync": "last"}),
    Case("zero3, 2 blocks per unit",
         {"kind": "zero3", "blocks_per_unit": 2, "prefetch": 2}),
    Case("zero3, chunked loss", {"kind": "zero3", "loss": "chunked", "loss_chunks": 3}),
    Case("zero3, tensor 2", {"kind": "zero3", "tensor": 2}),
    Case("zero3, context 2", {"kind": "zero3", "context": 2}),
    Case("zero3, groups of 2", {"kind": "zero3", "shard": 2}, devices=4),
    Case("zero3, reshard to groups of 2", {"kind": "zero3", "reshard_after_forward": 2},
         devices=4),
    Case("ddp, tensor 2", {"kind": "ddp", "tensor": 2}, devices=4),
)  # fmt: skip


def check_parity(bench: Bench) -> Iterator[Line]:
    """Train every strategy that the number of devices allows, and compare with one device."""
    expected = f"≤ {TOLERANCE:.0e}"
    processes = bench.machine.processes
    cases = [one for one in CASES if processes % _devices(one, processes) == 0]
    if processes == 1:
        cases = [Case("single", {"kind": "single"}, devices=1)]
    told = [{"name": one.name, "strategy": {**FP64, **one.strategy}} for one in cases]
    left = [one.name for one in cases]
    try:
        values = bench.on_ranks("shardwise.trials.accept.parity:differences", {"cases": told})
        for seen in values:
            left.remove(seen["name"])
            difference = seen["difference"]
            yield judge(
                seen["name"], expected, f"{difference:.0e}",
                difference <= TOLERANCE, "trains something else than one device",
                difference=difference,
            )  # fmt: skip
    except CheckFailedError as error:
        yield judge(left[0] if left else "end", expected, "", False, str(error))
        for name in left[1:]:
            yield not_run(name, expected, "the check before it failed")
    for one in CASES:
        if one not in cases:
            needed = _devices(one, processes)
            yield not_run(one.name, expected, f"needs a multiple of {needed} devices")


def _devices(case: Case, processes: int) -> int:
    """The number of which `processes` must be a multiple to run this case.

    Strategies without groups of a fixed size take any number from 2 on.
    """
    mesh = {"tensor", "context", "shard", "reshard_after_forward"}
    return case.devices if mesh & {*case.strategy} else max(2, processes)


# ---- on ranks ------------------------------------------------------------------------------------


def differences(case: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield for each strategy the largest difference of a parameter from one unsharded device.

    It is the maximum over all ranks, each of which trains the reference by itself.
    """
    import torch
    import torch.distributed as dist

    from shardwise.engine.mesh import join, leave, resolve_for_world, world
    from shardwise.pytorch.device import local_device

    device = local_device()
    join(device)
    size = world()[1]
    spec = ModelSpec.read(SMALL)
    sequences = max(4, 2 * size)
    alone = train_exactly(spec, None, device, sequences=sequences).parameters
    for one in case["cases"]:
        strategy = resolve_for_world(Strategy.model_validate(one["strategy"]))
        trained = train_exactly(spec, strategy, device, sequences=sequences).parameters
        largest = (trained - alone).abs().max()
        # A comparison would not notice NaN: parameters that are not finite differ by 1e9.
        largest = torch.where(torch.isfinite(trained).all(), largest, torch.full_like(largest, 1e9))
        if size > 1:
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        yield {"name": one["name"], "difference": float(largest)}
    leave()


class TrainedParameters(NamedTuple):
    """All parameters after the last step, unsharded and flat.

    `losses` alternates the loss and the gradient norm of each step.
    """

    parameters: torch.Tensor
    losses: list[float]


def train_exactly(
    spec: ModelSpec,
    strategy: Strategy | None,
    device: torch.device,
    *,
    sequences: int = 8,
    clip_norm: float = 0.5,
    packed: bool = False,
    meta: bool = False,
) -> TrainedParameters:
    """Train STEPS steps in fp64 under a resolved strategy.

    With None, on one device and without Shardwise's engine.
    """
    import torch

    from shardwise.engine.head_with_loss import IGNORED
    from shardwise.engine.local_parts import as_dtensor_like
    from shardwise.engine.loss import loss_of
    from shardwise.engine.mesh import data_rank
    from shardwise.engine.sync import micro_batch
    from shardwise.trainer.clip import clip_gradients

    model = _model(spec, strategy, device, meta=meta)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    loss_sum, losses = loss_of(model), []
    mesh = strategy.mesh if strategy is not None else Mesh()
    accumulate = strategy.accumulate if strategy is not None else 1
    rank = data_rank(strategy) if strategy is not None else 0
    for step in range(STEPS):
        batch = batch_of(step, spec.vocab, packed, sequences)
        tokens = int((batch[1] != IGNORED).sum())
        mine = [part.chunk(mesh.data_parallel)[rank].to(device) for part in batch]
        total = torch.zeros((), dtype=torch.float64, device=device)
        parts = zip(*(part.chunk(accumulate) for part in mine), strict=True)
        for index, (ids, targets, positions) in enumerate(parts):
            last = index == accumulate - 1
            with micro_batch(model, last=last) if strategy is not None else nullcontext():
                scale = mesh.replicate * mesh.states / tokens
                loss = loss_sum(ids, targets, positions if packed else None) * scale
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        norm = clip_gradients(trained, clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=strategy is None or strategy.kind != "ddp")
        if mesh.devices > 1:
            torch.distributed.all_reduce(total)
        losses += [float(total) / mesh.devices, float(norm)]
    whole = [full_tensor(as_dtensor_like(p, p.detach())).flatten() for p in model.parameters()]
    return TrainedParameters(torch.cat(whole), losses)


def _model(
    spec: ModelSpec, strategy: Strategy | None, device: torch.device, *, meta: bool
) -> nn.Module:
    """The model in fp64 with equal weights on every device, sharded unless `strategy` is None."""
    import torch

    from shardwise.engine.parallelize import parallelize
    from shardwise.pytorch.build import build_module

    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        module = build_module(spec).double()
    compute_norms_exactly(module)
    module = module if meta else module.to(device)
    return module if strategy is None else parallelize(module, strategy, device=device)


def batch_of(step: int, vocab: int, packed: bool, sequences: int = 8) -> list[torch.Tensor]:
    """[ids, targets, positions] of all sequences of a step.

    About a fifth of the targets do not count for the loss. With `packed`, a sequence is three
    examples.
    """
    import torch

    from shardwise.engine.head_with_loss import IGNORED

    data = torch.Generator().manual_seed(step)
    ids, targets = torch.randint(0, vocab, (2, sequences, SEQ_LEN), generator=data)
    targets[torch.rand(targets.shape, generator=data) < 0.2] = IGNORED
    positions = torch.arange(SEQ_LEN).repeat(sequences, 1)
    if packed:
        # Each sequence is three examples of random lengths.
        for row in range(sequences):
            cuts = sorted((1 + torch.randperm(SEQ_LEN - 1, generator=data)[:2]).tolist())
            lengths = [cuts[0], cuts[1] - cuts[0], SEQ_LEN - cuts[1]]
            positions[row] = torch.cat([torch.arange(length) for length in lengths])
    return [ids, targets, positions]


def compute_norms_exactly(module: nn.Module) -> None:
    """Make RMS norms compute in the dtype of their input; transformers' own always use fp32.

    Rounding to fp32 would enlarge differences of 1e-16 between processes to 1e-8.
    """
    for norm in module.modules():
        if type(norm).__name__.endswith("RMSNorm"):
            norm.forward = functools.partial(_rms_norm, norm)


def _rms_norm(norm: Any, hidden: torch.Tensor) -> torch.Tensor:
    """The RMS norm of `hidden` in its own dtype, with the weight of the module `norm`."""
    import torch

    gemma = hasattr(norm, "eps")
    epsilon = norm.eps if gemma else norm.variance_epsilon
    scaled = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + epsilon)
    weighted: torch.Tensor = scaled * (1.0 + norm.weight if gemma else norm.weight)
    return weighted


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a DTensor; any other tensor as it is."""
    whole: Any = getattr(tensor, "full_tensor", None)
    return tensor if whole is None else whole()
