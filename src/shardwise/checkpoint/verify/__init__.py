"""Verify a checkpoint's integrity. Needs no torch."""
