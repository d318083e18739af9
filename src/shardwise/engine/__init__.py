"""Apply a strategy with fully_shard, DDP and DTensor."""
