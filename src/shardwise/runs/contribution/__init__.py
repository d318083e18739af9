"""Contributions: what runs measured, beside their predictions, without any text of a user."""
