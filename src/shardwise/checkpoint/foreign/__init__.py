"""Checkpoints of others, read without running anything in them."""
