"""One self-contained HTML page about any number of plans, runs and traces."""
