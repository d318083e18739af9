"""Plans for a page: one function that answers questions, in a browser or behind a server."""
