"""Start the ranks of a run, watch and restart them; hosts meet."""
