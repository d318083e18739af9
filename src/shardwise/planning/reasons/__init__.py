"""The reasons behind a plan: each is one class, with its data, its text and its JSON."""
