"""What Shardwise asks of PyTorch: devices, private names, modules."""
