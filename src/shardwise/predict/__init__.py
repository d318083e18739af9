"""Predict memory, traffic and time of a step from units and strategy."""
