"""For loops that are not ours: predict what runs there, measure it, and say how far off that was.

- `watch.StepWatch`: any loop.
- `transformers.ShardwiseCallback`: the Trainer of transformers.
- `lightning.ShardwiseCallback`: the Trainer of Lightning.
"""
