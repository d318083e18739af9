"""Units, strategy and cluster become memory, traffic and work."""
