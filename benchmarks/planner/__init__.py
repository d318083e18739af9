"""The planner in a browser: what it costs, and whether it answers as the command line does."""
