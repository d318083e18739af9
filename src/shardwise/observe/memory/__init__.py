"""What held memory, when, and why: allocator snapshots, profiler timelines and runs of our own."""
