"""Acceptance of a machine: what Shardwise promises, checked on its real devices."""
