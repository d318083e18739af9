"""Analysis of memory recordings: allocator snapshots, profiler timelines and own runs."""
