"""A training script of plain PyTorch, which knows nothing of Shardwise; torchrun starts it.

Its arguments: a folder that all hosts see, and the number of steps. A file `slow` in that folder
makes steps slow.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SAVE_EVERY = 5


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch of a step, divisible by 1, 2 and 3 ranks."""
    inputs = torch.randn(12, 4, generator=torch.Generator().manual_seed(step))
    return inputs, inputs.sum(1, keepdim=True).sin()


def main(folder: Path, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = DistributedDataParallel(new_model())
    optimizer = new_optimizer(model)
    saved, first = folder / "checkpoint.pt", 0
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    for step in range(first, steps):
        inputs, targets = (part.chunk(world)[rank] for part in batch(step))
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if (folder / "slow").exists():
            time.sleep(0.3)
        if rank > 0:
            continue
        with (folder / "steps.jsonl").open("a") as file:
            line = {"step": step, "loss": mean.item(), "world": world}
            file.write(json.dumps(line) + "\n")
        if (step + 1) % SAVE_EVERY == 0:
            state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step + 1}, folder / "unfinished.pt")
            (folder / "unfinished.pt").replace(saved)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
