"""What Shardwise asks of PyTorch itself."""
