"""The training script that someone with accelerate already has."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import AutoModelForCausalLM

accelerator = Accelerator()
model = AutoModelForCausalLM.from_pretrained("my-model")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
sequences = TensorDataset(torch.randint(0, model.config.vocab_size, (64, 64)))
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(sequences, 4))
for (ids,) in loader:
    loss = model(input_ids=ids, labels=ids).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.print(f"loss {loss.item():.3f} on {accelerator.num_processes} processes")
accelerator.end_training()
