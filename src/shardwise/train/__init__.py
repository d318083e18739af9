"""The trainer: one readable loop on PyTorch, with launching, recovery and measurement."""
