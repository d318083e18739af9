"""Checkpoints that can be verified: torch's distributed checkpoint on files with checksums."""
