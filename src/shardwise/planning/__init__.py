"""Which configuration to run, why, and what would change it."""
