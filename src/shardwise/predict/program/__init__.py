"""One step of one device as a program of events, and what emits it."""
