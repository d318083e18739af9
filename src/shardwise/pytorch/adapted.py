"""Adapters in a module: peft injects them, and the rest of the module is frozen.

The module keeps its class, its forward and its lists of blocks. An adapted linear layer becomes a
peft layer that holds the linear layer as `base_layer`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from shardwise.pytorch.quiet_libraries import quiet_imports
from shardwise.spec.adapter import Adapter
from shardwise.spec.record import SpecError, did_you_mean

# The name that peft gives adapters, and with which it loads exported ones.
NAME = "default"
_BASE = ".base_layer"
_MARK = "_shardwise_adapter"


def adapt(module: nn.Module, adapter: Adapter) -> nn.Module:
    """Freeze `module`, inject its adapters, and unfreeze what is trained in full.

    Works on the meta device too. `parallelize` then stores frozen weights as the adapter says.

    Raises:
        SpecError: peft is missing, or no layer or parameter has one of the given names.
    """
    if adapted_layers([module]):
        raise SpecError("adapter: the model has adapters already; leave the section out")
    module.requires_grad_(False)
    if adapter.rank is not None:
        _inject(module, adapter)
    _train_in_full(module, adapter)
    object.__setattr__(module, _MARK, adapter)
    return module


def adapter_of(module: nn.Module) -> Adapter | None:
    """The adapter that `adapt` applied to the module, also inside DDP; None without one."""
    inner = module.module if isinstance(module, DistributedDataParallel) else module
    return cast("Adapter | None", getattr(inner, _MARK, None))


def is_adapted(layer: nn.Module) -> bool:
    """Whether a layer is a LoRA layer of peft."""
    return hasattr(layer, "base_layer") and hasattr(layer, "lora_A")


def adapted_layers(modules: Iterable[nn.Module]) -> list[nn.Module]:
    """All LoRA layers inside the modules."""
    return [layer for module in modules for layer in module.modules() if is_adapted(layer)]


def base_name(name: str) -> str:
    """The name that a parameter or layer has without adapters."""
    return name.replace(_BASE, "")


@contextmanager
def without_adapters(modules: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Yield the modules as they were before `adapt`, with the same tensors, inside a context."""
    given = list(modules)
    parents = [parent for module in given for parent in module.modules() if not is_adapted(parent)]
    replaced = [
        (parent, name, layer)
        for parent in parents
        for name, layer in parent.named_children()
        if is_adapted(layer)
    ]
    for parent, name, layer in replaced:
        setattr(parent, name, layer.base_layer)
    try:
        yield [
            cast(nn.Module, module.base_layer) if is_adapted(module) else module for module in given
        ]
    finally:
        for parent, name, layer in replaced:
            setattr(parent, name, layer)


def lora_config(module: nn.Module, adapter: Adapter) -> Any:
    """The LoraConfig of peft for a module, with or without its adapters."""
    try:
        from peft import LoraConfig
    except ModuleNotFoundError:
        raise SpecError(
            "adapter: LoRA needs peft; install it with 'pip install \"shardwise[adapters]\"'"
        ) from None
    assert adapter.rank is not None
    # The type in peft is int, but any number works.
    alpha: Any = int(adapter.scale) if adapter.scale == int(adapter.scale) else adapter.scale
    with without_adapters([module]):
        layers = _linear_layers(module)
        targets = _target_names(module, layers, adapter)
    return LoraConfig(
        r=adapter.rank,
        lora_alpha=alpha,
        target_modules=targets,
        lora_dropout=adapter.dropout,
        use_rslora=adapter.rslora,
        use_dora=adapter.dora,
        # Conv1D of transformers stores its weight transposed.
        fan_in_fan_out=any(not isinstance(layer, nn.Linear) for layer in layers.values()),
        task_type="CAUSAL_LM" if hasattr(module, "config") else None,
    )


def _inject(module: nn.Module, adapter: Adapter) -> None:
    """Add the adapters to the module, in place."""
    with quiet_imports():
        config = lora_config(module, adapter)
        from peft import inject_adapter_in_model

        with torch.device(next(module.parameters()).device):
            inject_adapter_in_model(config, module, NAME)
    for layer in adapted_layers([module]):
        # peft casts the input of an adapter to the adapter's dtype. Autocast and FSDP bring both
        # to one dtype anyway; under autocast the cast would keep an fp32 copy of every adapted
        # input alive until the backward pass.
        layer.cast_input_dtype_enabled = False  # type: ignore[assignment]


def _linear_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Linear layers by name, including the Conv1D of transformers."""
    return {
        name: layer
        for name, layer in module.named_modules()
        if isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
    }


def _target_names(
    module: nn.Module, layers: dict[str, nn.Module], adapter: Adapter
) -> list[str] | str:
    """Names of the layers that get an adapter: only their last parts, if these are unique."""
    head = getattr(module, "get_output_embeddings", lambda: None)()
    by_name = {layer for layer in layers if adapter.adapts(layer)}
    everything = adapter.targets == ("all-linear",)
    chosen = {name for name in by_name if not (everything and layers[name] is head)}
    missing = [
        target
        for target in adapter.targets
        if not everything and not any(n == target or n.endswith(f".{target}") for n in chosen)
    ]
    if missing or not chosen:
        known = sorted({name.rpartition(".")[2] for name in layers})
        wanted = missing[0] if missing else "all-linear"
        raise SpecError(
            f"adapter.targets: {type(module).__name__} has no linear layer '{wanted}' "
            f"(it has {', '.join(known) or 'none'}){did_you_mean(wanted, known)}"
        )
    short = {name.rpartition(".")[2] for name in chosen}
    others = {name.rpartition(".")[2] for name in layers.keys() - chosen}
    return sorted(short if not short & others else chosen)


def _train_in_full(module: nn.Module, adapter: Adapter) -> None:
    """Unfreeze the parameters that adapter.train names."""
    names = {base_name(name): p for name, p in module.named_parameters() if ".lora_" not in name}
    for pattern in adapter.train:
        matching = [parameter for name, parameter in names.items() if pattern in name]
        if not matching:
            raise SpecError(
                f"adapter.train: no parameter of {type(module).__name__} has '{pattern}' in its "
                f"name; names are such as {next(iter(names))}"
            )
        for parameter in matching:
            parameter.requires_grad_(True)
