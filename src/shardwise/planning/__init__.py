"""Search for the best configuration, explain it, and ask what would change it."""
