"""Other training stacks: a run written as their configuration, and theirs read as a run."""
