"""Timelines of a step, simulated or measured: spans on lanes."""
