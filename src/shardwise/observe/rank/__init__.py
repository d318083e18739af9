"""One rank: classify its events, measure exposure of its collectives, explain idle time."""
