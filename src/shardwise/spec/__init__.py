"""What to train, on what and how; the files and words of a run."""
