"""Apply a Strategy with PyTorch's FSDP2 and DDP. No other package calls fully_shard or DDP."""
