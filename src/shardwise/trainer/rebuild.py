"""Build the adapted model of a finished run again, with the frozen weights it was trained with."""

from __future__ import annotations

import torch
from torch import nn

from shardwise.checkpoint.format.manifest import Manifest
from shardwise.engine.adapter import FrozenWeights
from shardwise.engine.materialize import Materializer
from shardwise.pytorch.build import build_module
from shardwise.pytorch.parts import Parts
from shardwise.spec.lookup import Model
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import TrainSettings
from shardwise.trainer.start import is_pretrained, weights_folder
from shardwise.trainer.weights import pretrained_fill


def rebuild(manifest: Manifest, model: Model) -> nn.Module:
    """Build the adapted model of the run that `manifest` describes, on the CPU in fp32.

    Its weights are those at the start of the run: from its pretrained files, or from its seed.
    """
    settings = TrainSettings.read(manifest.run.get("train", {}), where="train")
    strategy = Strategy.read(manifest.run.get("strategy", {}), where="strategy")
    cpu = torch.device("cpu")
    torch.manual_seed(settings.seed)
    with torch.device("meta" if settings.meta_init else cpu):
        module = build_module(model)
    fill = pretrained_fill(module, weights_folder(model)) if is_pretrained(model) else None
    # Which weights can be quantised depends on the ranks that share them.
    parts = Parts(module)
    frozen = FrozenWeights(parts, strategy.mesh.states if strategy.sharded else 1)
    materializer = Materializer(module, cpu, torch.float32, fill, settings.seed, frozen)
    for members in parts.one_by_one():
        materializer.unit(members)
    frozen.finish(module)
    return module
