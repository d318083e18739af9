"""Past runs: find them, query them, compare them, contribute them."""
