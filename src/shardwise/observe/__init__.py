"""Analyse the traces and memory snapshots of a run."""
