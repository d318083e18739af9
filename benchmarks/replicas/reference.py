"""The same training on plain FSDP2 and torch.distributed, with batches of absent groups dropped.

All groups are ranks of one world, and none ever fails. `schedule.json` says which groups took part
in each step. Those all-reduce their gradients in a process group of their own and send the mean to
the others, so that every rank makes every update. Only the data comes from Shardwise.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy

from benchmarks.replicas import recorded
from shardwise.trainer.data.batches import Layout, SyntheticBatches

GROUPS, RANKS, MICRO_BATCH, SEQ_LEN, VOCAB, SEED = 3, 2, 2, 16, 64, 0
LEARNING_RATE, DECAY, BETAS, CLIP = 1e-2, 0.1, (0.9, 0.95), 1.0


class Average:
    """The all-reduce hook of one rank, for the groups of the current step."""

    def __init__(self, schedule: list[list[int]]) -> None:
        self._rank = dist.get_rank()
        self._own, shard = divmod(self._rank, RANKS)
        self._lines = [[group * RANKS + s for group in range(GROUPS)] for s in range(RANKS)]
        self._all = [dist.new_group(line) for line in self._lines][shard]
        self._members: dict[tuple[int, ...], Any] = {}
        for present in sorted({tuple(one) for one in schedule}):
            made = [dist.new_group([line[group] for group in present]) for line in self._lines]
            self._members[present] = made[shard]
        self._shard = shard
        self.present: tuple[int, ...] = ()

    def __call__(self, gradients: torch.Tensor) -> None:
        if self._own in self.present:
            dist.all_reduce(gradients, group=self._members[self.present])
            gradients /= len(self.present)
        dist.broadcast(gradients, self._lines[self._shard][self.present[0]], group=self._all)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in module.parameters() if p.ndim >= 2]
    others = [p for p in module.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": DECAY},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=BETAS, eps=1e-8, fused=True)


def main(folder: Path) -> None:
    schedule: list[list[int]] = json.loads((folder / "schedule.json").read_text())
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = rank // RANKS
    torch.manual_seed(SEED)
    module: Any = recorded.model()
    meshes = [DeviceMesh("cpu", list(range(g * RANKS, (g + 1) * RANKS))) for g in range(GROUPS)]
    for unit in (*module.layers, module):
        fully_shard(unit, mesh=meshes[group], reshard_after_forward=unit is not module)
    average = Average(schedule)
    for unit in module.modules():
        if isinstance(unit, FSDPModule):
            unit.set_all_reduce_hook(average)
    optimizer = optimizer_of(module)
    data = SyntheticBatches(Layout(rank, GROUPS * RANKS, MICRO_BATCH, 1, SEQ_LEN), VOCAB, SEED)
    for step, present in enumerate(schedule):
        average.present = tuple(present)
        [batch] = data.at(step)
        tokens = len(present) * RANKS * MICRO_BATCH * SEQ_LEN
        logits = module(batch.inputs).flatten(0, 1).float()
        loss = cross_entropy(logits, batch.targets.flatten(), reduction="sum")
        (loss * (len(present) * RANKS / tokens)).backward()
        nn.utils.clip_grad_norm_(module.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        recorded.write_digest(optimizer, folder / f"reference-{rank}.jsonl")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    recorded.PAUSE_S = 0.0
    main(Path(sys.argv[1]))
