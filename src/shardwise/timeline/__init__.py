"""Spans on lanes: the one shape of a step, simulated or measured."""
