"""The weights of a checkpoint, for others."""
