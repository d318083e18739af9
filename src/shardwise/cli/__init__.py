"""One thin file per command, and how errors are reported."""
