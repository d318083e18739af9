"""One rank: what each of its events is, what its collectives hid, and what its host did."""
