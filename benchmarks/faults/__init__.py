"""The fault matrix: inject faults into real runs and compare the results."""
