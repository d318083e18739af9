"""A model as a sequence of FSDP units."""
