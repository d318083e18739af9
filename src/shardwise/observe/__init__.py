"""Traces and memory snapshots, read honestly: where the time went, on which unit, and why."""
