"""Replica groups that need no restart: each is a launch of its own, and torchft connects them."""
