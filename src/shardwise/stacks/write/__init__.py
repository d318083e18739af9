"""A run as the file of another stack, and what that cannot say."""
