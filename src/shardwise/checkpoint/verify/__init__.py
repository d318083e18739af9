"""Whether a checkpoint is whole and is what was saved. Needs no torch."""
