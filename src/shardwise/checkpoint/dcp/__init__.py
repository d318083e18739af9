"""Save and load through torch's distributed checkpoint (DCP)."""
