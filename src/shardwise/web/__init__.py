"""A question as JSON in, the answer out; the page and its server."""
