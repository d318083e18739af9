"""The trainer: the loop, its data, its checkpoints, its measurement."""
