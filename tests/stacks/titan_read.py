"""Reads configurations with torchtitan's own classes; started by the tests, as torchtitan would be.

Prints, for each module named, what torchtitan understood, the parameters of the model it would
build and the learning rates it would use.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import torch
from torchtitan.config import ConfigManager
from torchtitan.models.common.rope import RoPE


def learning_rates(config: Any, steps: int) -> list[float]:
    weight = torch.nn.Parameter(torch.zeros(1))
    [group] = config.optimizer.param_groups
    optimizer = torch.optim.AdamW([weight], **group.optimizer_kwargs)
    scheduler = config.lr_scheduler.build(
        optimizers=[optimizer], training_steps=config.training.steps
    )
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return found


def read(module: str) -> dict[str, Any]:
    config: Any = ConfigManager().parse_args(["--module", module, "--config", "run"])
    spec = config.model_spec
    with torch.device("meta"):
        model = spec.model.build()
    parameters = {id(p): p.numel() for p in model.parameters()}
    [theta] = {module.config.theta for module in model.modules() if isinstance(module, RoPE)}
    policy = config.activation_checkpoint
    return {
        "training": dataclasses.asdict(config.training),
        "parallelism": dataclasses.asdict(config.parallelism),
        "compile": dataclasses.asdict(config.compile),
        "checkpoint": dataclasses.asdict(config.checkpoint),
        "metrics": dataclasses.asdict(config.metrics),
        "optimizer": dataclasses.asdict(config.optimizer),
        "recompute": type(policy).__qualname__ if policy is not None else None,
        "loss": {
            "kind": type(config.loss).__qualname__,
            "chunks": getattr(config.loss, "num_chunks", None),
        },
        "flavor": spec.flavor,
        "assets": config.hf_assets_path,
        "parameters": sum(parameters.values()),
        "theta": theta,
        "tied": spec.model.enable_weight_tying,
        "learning_rates": learning_rates(config, min(config.training.steps, 60)),
    }


if __name__ == "__main__":
    print("RESULT " + json.dumps({module: read(module) for module in sys.argv[1:]}))
