"""Predict and measure inside the Trainer, accelerate and Lightning.

- `watch.StepWatch`: any loop.
- `transformers.ShardwiseCallback`: the transformers Trainer.
- `lightning.ShardwiseCallback`: the Lightning Trainer.
"""
