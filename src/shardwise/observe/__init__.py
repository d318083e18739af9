"""Analysis of profiler traces and memory snapshots: where time and memory go, and why."""
