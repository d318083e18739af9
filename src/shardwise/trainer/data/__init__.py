"""From texts and shards to the batches of a step."""
