"""Read the weights of a local pretrained folder, tensor by tensor, while units are created."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from shardwise.engine.materialize import Fill, own_initializer
from shardwise.spec.record import SpecError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def pretrained_fill(model: nn.Module, folder: Path) -> Fill:
    """A function that fills a module's parameters from the safetensors in `folder`.

    Buffers are computed by the model. A parameter that no file holds stays unset, and the check of
    its unit reports it by name.
    """
    try:
        from safetensors import safe_open
    except ModuleNotFoundError:
        raise SpecError(
            "model.pretrained: needs safetensors; install it with 'pip install shardwise[hf]'"
        ) from None
    files = _files_of_tensors(folder)
    opened: dict[Path, Any] = {}
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    initialise = own_initializer(model)

    def fill(name: str, module: nn.Module) -> None:
        if any(True for _ in module.buffers(recurse=False)):
            initialise(name, module)
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            full = f"{name}.{key}" if name else key
            # Files of a base model without its head lack the prefix.
            stored = full if full in files else full.removeprefix(prefix)
            if stored not in files:
                continue
            file = files[stored]
            if file not in opened:
                opened[file] = safe_open(str(file), framework="pt")
            tensor = opened[file].get_tensor(stored)
            if tensor.shape != parameter.shape:
                raise SpecError(
                    f"model.pretrained: {stored} has shape {tuple(tensor.shape)} in {file.name}, "
                    f"but {tuple(parameter.shape)} in the model; use the config.json of the weights"
                )
            parameter.copy_(tensor)

    return fill


def _files_of_tensors(folder: Path) -> dict[str, Path]:
    """The safetensors file of each tensor, by the tensor's name."""
    if (folder / INDEX).exists():
        table: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        missing = sorted({file for file in table.values() if not (folder / file).is_file()})
        if missing:
            raise SpecError(
                f"model.pretrained: {folder / missing[0]} is missing; download it again"
            )
        return {name: folder / Path(file).name for name, file in table.items()}
    if not (folder / SINGLE).exists():
        raise SpecError(f"model.pretrained: {folder} contains neither {SINGLE} nor {INDEX}")
    from safetensors import safe_open

    with safe_open(str(folder / SINGLE), framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / SINGLE)
