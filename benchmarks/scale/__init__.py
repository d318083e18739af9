"""Measure how the cost of each part of Shardwise grows with scale."""
