"""Checkpoints of torch and Hugging Face, read without running anything in them."""
