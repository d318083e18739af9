"""A plain PyTorch loop, sharded with two lines (marked below), that saves and resumes.

torchrun --nproc-per-node 2 examples/own_loop.py

Stop it at any time and start it again: it resumes from its last checkpoint, with the same result.
"""

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shardwise

STEPS, MICRO_BATCH, ACCUMULATE, SAVE_EVERY = 40, 8, 2, 10
FOLDER = Path("checkpoints")

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(256, 128),
    nn.Sequential(
        *[nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True) for _ in range(4)]
    ),
    nn.Linear(128, 256, bias=False),
).to(device)
model = shardwise.parallelize(model, "zero3", param_dtype="fp32")  # (1)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

# Every rank trains on its own share of the data, in an order that depends on the epoch alone.
sequences = (torch.arange(256)[:, None] + 3 * torch.arange(33)) % 256
dataset = TensorDataset(sequences)
sampler = DistributedSampler(dataset, seed=0, drop_last=True)
loader = DataLoader(dataset, batch_size=MICRO_BATCH, sampler=sampler, drop_last=True)


def micro_batches(done: int) -> Iterator[torch.Tensor]:
    """Yield this rank's micro-batches, epoch after epoch, after the first `done` of them."""
    epoch, skip = divmod(done, len(loader))
    while True:
        sampler.set_epoch(epoch)
        for (ids,) in islice(loader, skip, None):
            yield ids.to(device)
        epoch, skip = epoch + 1, 0


def save(step: int) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=FOLDER / f"step-{step}")


def resume() -> int:
    """Load the last complete checkpoint and return its step; 0 if there is none."""
    # torch writes .metadata last: a folder without it is a save that was interrupted.
    saved = [int(file.parent.name[5:]) for file in FOLDER.glob("step-*/.metadata")]
    if not saved:
        return 0
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=FOLDER / f"step-{max(saved)}")
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return max(saved)


start = resume()
batches = micro_batches(done=start * ACCUMULATE)
for step in range(start + 1, STEPS + 1):
    for part in range(ACCUMULATE):
        ids = next(batches)
        with shardwise.micro_batch(model, last=part == ACCUMULATE - 1):  # (2)
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            (loss / ACCUMULATE).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % SAVE_EVERY == 0:
        save(step)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.3f}, saved to {FOLDER / f'step-{step}'}")
