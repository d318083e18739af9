"""Check a run in miniature before it costs anything."""
