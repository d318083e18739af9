"""Short real trainings, each of which answers one question."""
