"""Checkpoints on files with checksums, verified when read."""
