"""One optimizer step as a record: its profile, its timeline, comparisons, and their words."""
