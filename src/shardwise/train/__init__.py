"""The trainer: one readable loop on PyTorch's engine, and what it needs around it."""
