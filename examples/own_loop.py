"""A plain PyTorch loop, sharded by two lines (marked below).

torchrun --nproc-per-node 2 examples/own_loop.py
"""

import torch
from torch import nn

import shardwise

torch.manual_seed(0)
model = nn.Sequential(
    nn.Embedding(256, 128),
    nn.Sequential(
        *[nn.TransformerEncoderLayer(128, 4, 256, 0.0, batch_first=True) for _ in range(4)]
    ),
    nn.Linear(128, 256, bias=False),
)
model = shardwise.parallelize(model, "zero3", param_dtype="fp32")  # (1)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)

for step in range(40):
    for part in range(2):
        with shardwise.micro_batch(model, last=part == 1):  # (2) forward and backward
            ids = (torch.randint(0, 256, (8, 1)) + 3 * torch.arange(33)) % 256
            logits = model(ids[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            (loss / 2).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 9 and (
        not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    ):
        print(f"step {step + 1}: loss {loss.item():.3f}")
