"""Spans on lanes: the shape of a step, simulated or measured."""
