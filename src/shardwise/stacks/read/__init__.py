"""Files of other stacks, as the runs that they describe."""
