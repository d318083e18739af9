"""A Strategy on PyTorch's own engine. The only package that calls fully_shard and DDP."""
