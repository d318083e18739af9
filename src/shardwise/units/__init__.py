"""A model as a sequence of FSDP units, from formulas or from a real module."""
