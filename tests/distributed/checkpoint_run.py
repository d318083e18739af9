"""Save and load checkpoints under a strategy."""

from __future__ import annotations

import contextlib
import hashlib
import resource
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardwise.checkpoint.dcp import state
from shardwise.checkpoint.dcp.load import NoIntactCheckpointError, load_last
from shardwise.checkpoint.dcp.save import SaveError, Saver
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.pieces import Tensor
from shardwise.checkpoint.format.storage import find_storage
from shardwise.engine.parallelize import parallelize
from shardwise.spec.strategy import Strategy

# None is a multiple of a number of processes; the last leaves one of four with nothing.
VOCAB, HIDDEN, WIDE, FEW = 513, 7, 1027, 3
STACKED = 8
CPU = torch.device("cpu")


class Block(nn.Module):
    """Shapes that no number of processes divides, and stacked experts."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, WIDE), nn.Linear(WIDE, HIDDEN)
        self.few = nn.Parameter(torch.ones(FEW))
        # Two and four processes divide its second dimension, three its first.
        self.stacked = nn.Parameter(torch.randn(FEW, STACKED, HIDDEN))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        experts = self.stacked.square().sum((0, 1))
        return x + self.down(self.up(x).relu()) * self.few.sum() + x * experts


class Tied(nn.Module):
    """Its head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Block() for _ in range(2)])
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Run:
    """A model that trains under a strategy, and its optimizer."""

    def __init__(self, strategy: Mapping[str, Any], seed: int) -> None:
        torch.manual_seed(seed)
        chosen = Strategy.model_validate({"param_dtype": "fp32", **strategy})
        self.model = parallelize(Tied(), chosen)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, fused=True)

    def train(self) -> None:
        torch.manual_seed(dist.get_rank())
        ids = torch.randint(0, VOCAB, (2, 8))
        self.model(ids).logsumexp(-1).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def updated(self) -> dict[str, torch.Tensor]:
        return state.updated_tensors(self.model, self.optimizer)

    def save(self, saver: Saver, step: int) -> None:
        own = state.rank_state(dist.get_rank(), CPU, {"mark": torch.tensor([dist.get_rank() + 40])})
        told = Manifest(step=step, world=dist.get_world_size(), sequences=step, run={}, versions={})
        saver.save(self.updated(), state.buffers_of(self.model), own, told)

    def load(self, url: str) -> dict[str, Any]:
        """What was loaded, as this rank sees it."""
        own: dict[str, torch.Tensor] = {}

        def room(told: Manifest, saved: Mapping[str, Tensor]) -> dict[str, torch.Tensor]:
            state.make_optimizer_state(self.model, self.optimizer, saved)
            if told.world == dist.get_world_size():
                own.update(state.allocate_rank_state(saved, dist.get_rank()))
            return {**self.updated(), **state.buffers_of(self.model), **own}

        try:
            loaded = load_last(find_storage(url), room)
        except NoIntactCheckpointError as error:
            return {"nothing": str(error)}
        if loaded is None:
            return {}
        mark = own.get(f"rank.{dist.get_rank()}.mark")
        return {
            "step": loaded.manifest.step,
            "passed_over": loaded.skipped,
            "mark": mark.item() if mark is not None else None,
            "digests": self.digests(),
        }

    def digests(self) -> dict[str, str]:
        """Of every tensor as a whole, whoever holds it."""
        tensors = {**self.updated(), **state.buffers_of(self.model)}
        return {name: digest(full(tensor)) for name, tensor in tensors.items()}


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach()
    return plain.to_local() if isinstance(plain, DTensor) else plain


def digest(tensor: torch.Tensor) -> str:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)}".encode() + raw).hexdigest()


def save_steps(case: dict[str, Any]) -> dict[str, Any]:
    """Train, saving after every step; digests by the step."""
    run = Run(case["strategy"], seed=0)
    saver = Saver(find_storage(case["place"]), case.get("keep", 0), case.get("background", False))
    found = {}
    for step in case["steps"]:
        run.train()
        run.save(saver, step)
        found[str(step)] = run.digests()
        saver.wait()
    return found


def load(case: dict[str, Any]) -> dict[str, Any]:
    """Load into a model with other values; then save it again where that is asked for."""
    run = Run(case["strategy"], seed=1)
    found = run.load(case["place"])
    if "save" in case:
        saver = Saver(find_storage(case["place"]), 0, False)
        run.save(saver, case["save"])
        saver.wait()
    return found


def overtake(case: dict[str, Any]) -> dict[str, Any]:
    """Go on training as soon as a background save allows it, while it is written."""
    run = Run(case["strategy"], seed=0)
    saver = Saver(find_storage(case["place"]), 0, True)
    found = {}
    for step in (1, 2):
        run.train()
        found[str(step)] = run.digests()
        # At hand, so that the save has no time to end before they change.
        held = [local(tensor) for tensor in run.updated().values()]
        run.save(saver, step)
        saver.wait_until_copied()
        torch._foreach_add_(held, 1000)
        found[f"after {step}"] = run.digests()
        saver.wait()
    return found


def fail(case: dict[str, Any]) -> dict[str, Any]:
    """A step that is saved, one that cannot be, and what is then found."""
    run = Run(case["strategy"], seed=0)
    saver = Saver(find_storage(case["place"]), 0, case["background"])
    run.train()
    run.save(saver, 1)
    saver.wait()
    first = run.digests()
    run.train()
    said = ""
    with no_large_files(case["small_on"]):
        run.save(saver, 2)
        try:
            saver.wait()
        except SaveError as error:
            said = str(error)
    found = {"said": said, "first": first, "loaded": Run(case["strategy"], 1).load(case["place"])}
    if case["small_on"] is not None:
        run.save(saver, 3)
        saver.wait()
        found["third"] = run.digests()
        found["loaded_then"] = Run(case["strategy"], 1).load(case["place"])
    return found


def refuse(case: dict[str, Any]) -> dict[str, Any]:
    """What is said of a place that takes nothing."""
    run = Run(case["strategy"], seed=0)
    saver = Saver(find_storage(case["place"]), 0, case["background"])
    run.train()
    run.save(saver, 1)
    try:
        saver.wait()
    except SaveError as error:
        return {"said": str(error)}
    return {"said": ""}


@contextlib.contextmanager
def no_large_files(rank: int | None) -> Iterator[None]:
    """On one rank, a write fails half-way through its file."""
    if rank != dist.get_rank():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**15, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


DO = {"save": save_steps, "load": load, "overtake": overtake, "fail": fail, "refuse": refuse}


def run(case: dict[str, Any]) -> dict[str, Any]:
    """What `case["do"]` names, as this rank sees it."""
    return DO[case["do"]](case)
