"""Read files of other stacks as settings of a run."""
