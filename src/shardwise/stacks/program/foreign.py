"""Models that other code builds: transformers, or the user's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)

from shardwise.stacks.program.divide import attend_in_transformers
from shardwise.stacks.program.seeds import seed_of
from shardwise.stacks.program.settings import (
    ATTENTION,
    CONFIG,
    CONFIG_IS_PATH,
    DEVICE,
    DIVIDED,
    FACTORY,
    MASTER_DTYPE,
    MODEL,
    PRETRAINED,
    SEED,
)


def build() -> nn.Module:
    if MODEL == "factory":
        return FACTORY().train()
    if DIVIDED:
        AttentionInterface.register(ATTENTION, attend_in_transformers)
        AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)
    if PRETRAINED:
        model = AutoModelForCausalLM.from_pretrained(
            CONFIG, attn_implementation=ATTENTION, dtype=torch.float32
        )
    else:
        if CONFIG_IS_PATH:
            config = AutoConfig.from_pretrained(CONFIG)
        else:
            config = AutoConfig.for_model(**CONFIG)
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION, dtype=torch.float32
        )
    model.config.use_cache = False
    return model.train()


class Initializer:
    """Allocates and initialises the tensors of a model on the meta device, unit by unit.

    So no process ever holds more than one unsharded unit.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        # Tied parameters stay one.
        self.allocated: dict[torch.Tensor, torch.Tensor] = {}

    def __call__(self, unit: nn.Module) -> None:
        fresh = {module for module in unit.modules() if self.allocate(module)}
        for module in reversed(list(unit.modules())):
            if fresh & {module, *module.children()}:
                torch.manual_seed(seed_of(self.names[module]))
                with torch.no_grad():
                    self.fill(module)
        # Later random numbers, such as dropout, use the run's own seed.
        torch.manual_seed(SEED)

    def allocate(self, module: nn.Module) -> bool:
        own = module.named_parameters(recurse=False, remove_duplicate=False)
        tensors = [*own, *module.named_buffers(recurse=False, remove_duplicate=False)]
        fresh = [(name, tensor) for name, tensor in tensors if tensor.is_meta]
        for name, tensor in fresh:
            if tensor not in self.allocated:
                real = torch.empty_like(tensor, device=DEVICE)
                if isinstance(tensor, nn.Parameter):
                    real = nn.Parameter(real.to(MASTER_DTYPE), tensor.requires_grad)
                self.allocated[tensor] = real
            setattr(module, name, self.allocated[tensor])
        return bool(fresh)

    def fill(self, module: nn.Module) -> None:
        if MODEL == "factory":
            if not all(hasattr(self.model, name) for name in ("_init_weights", "config")):
                reset(module)
                return
        self.model._init_weights(module)


def reset(module: nn.Module) -> None:
    """Initialise a module as torch does, by the function that it has for it."""
    for name in ("reset_parameters", "_reset_parameters"):
        if hasattr(module, name):
            getattr(module, name)()
            return


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def find_blocks(model: nn.Module) -> list[Any]:
    """The repeated blocks: lists of modules of the classes with the most parameters."""
    outer: list[str] = []
    blocks: dict[frozenset[type], list[nn.Module]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)) or len(module) < 2:
            continue
        inside = any(name.startswith(f"{other}.") for other in outer)
        classes = [type(member) for member in module]
        # Hybrids have layers of a few classes, each several times.
        hybrid = isinstance(module, nn.ModuleList) and min(map(classes.count, classes)) > 1
        if (len(set(classes)) == 1 or hybrid) and all(map(size, module)) and not inside:
            outer.append(name)
            blocks.setdefault(frozenset(classes), []).extend(module)
    return max(blocks.values(), key=lambda found: sum(map(size, found)))


def vocabulary(model: nn.Module) -> int:
    """The size of the model's vocabulary."""
    config = getattr(model, "config", None)
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    return getattr(config, "vocab_size", None) or tables[0].num_embeddings
