"""Predict and measure the steps of other training loops, and compare the two.

- `watch.StepWatch`: any loop.
- `transformers.ShardwiseCallback`: the transformers Trainer.
- `lightning.ShardwiseCallback`: the Lightning Trainer.
"""
