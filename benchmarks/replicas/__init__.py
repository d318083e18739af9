"""Kill replica groups of real runs, and compare every step with a run that drops their batches."""
