"""Export an adapted model: its adapters in PEFT's format, or merged into the base."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from shardwise.checkpoint.dcp import state
from shardwise.checkpoint.export.config import check_weights_match
from shardwise.checkpoint.export.tensor_reader import TensorReader
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.pieces import Tensor
from shardwise.checkpoint.format.synced import sync_file, write_synced
from shardwise.engine.adapter import base_digest, is_quantised
from shardwise.engine.stored_experts import StoredExperts
from shardwise.pytorch.adapted import (
    adapted_layers,
    adapter_of,
    base_name,
    is_adapted,
    lora_config,
)
from shardwise.pytorch.build import build_module
from shardwise.pytorch.quiet_libraries import quiet_imports, silence_transformers
from shardwise.spec.adapter import Adapter
from shardwise.spec.lookup import Model
from shardwise.spec.record import SpecError

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# The names that peft gives the parameters of a wrapped model.
_PEFT_PREFIX = "base_model.model."

# Builds the adapted model of a run on the CPU, with the frozen weights of the training.
Rebuild = Callable[[Manifest, Model], nn.Module]


def write_adapter(
    folder: Path,
    model: Model,
    saved: Mapping[str, Tensor],
    reader: TensorReader,
    dtype: torch.dtype | None,
) -> dict[str, torch.Tensor]:
    """Write adapter_model.safetensors and adapter_config.json; return the tensors written.

    `dtype` None keeps the saved dtypes.
    """
    with quiet_imports():
        from peft import get_peft_model_state_dict
    from safetensors.torch import save

    # Only names and shapes are needed.
    with torch.device("meta"):
        module = build_module(model)
    check_weights_match(module, saved)
    adapter = cast(Adapter, adapter_of(module))
    parameters = {
        name: _cast(reader.read(f"{state.MODEL}.{name}"), dtype)
        for name in state.saved_parameters(module)
    }
    in_full = {base_name(name): p for name, p in parameters.items() if ".lora_" not in name}
    adapters = get_peft_model_state_dict(module, state_dict=parameters, save_embedding_layers=False)
    config = lora_config(module, adapter)
    config.modules_to_save = _fully_trained_modules(module, in_full) or None
    config.base_model_name_or_path = getattr(model, "config", None) or ""
    config.inference_mode = True
    tensors = {f"{_PEFT_PREFIX}{name}": tensor for name, tensor in {**adapters, **in_full}.items()}
    write_synced(folder / WEIGHTS, save(tensors, {"format": "pt"}))
    write_synced(folder / CONFIG, _as_json(config))
    return tensors


def _as_json(config: Any) -> bytes:
    """The bytes of a configuration, as peft writes it."""
    table = {k: sorted(v) if isinstance(v, set) else v for k, v in config.to_dict().items()}
    return f"{json.dumps(table, indent=2, sort_keys=True)}\n".encode()


def _cast(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A tensor in `dtype` (None: unchanged); raise SpecError if a value overflows."""
    converted = tensor if dtype is None else tensor.to(dtype)
    if not torch.equal(converted.isfinite(), tensor.isfinite()):
        raise SpecError(f"--dtype: a trained weight overflows {dtype}; use bf16 or fp32")
    return converted


def _fully_trained_modules(module: nn.Module, in_full: dict[str, torch.Tensor]) -> list[str]:
    """Names of modules whose parameters are all trained in full, which PEFT saves in full.

    Raises SpecError if only some parameters of a module are trained.
    """
    names = sorted({name.rpartition(".")[0] for name in in_full})
    for name in names:
        layer = module.get_submodule(name)
        own = {f"{name}.{key}" for key, _ in layer.named_parameters()}
        if is_adapted(layer) or not own <= in_full.keys():
            raise SpecError(
                f"export-weights: only a part of {name} is trained, which PEFT's format cannot "
                "hold; use --merge"
            )
    return names


def merged_model(
    manifest: Manifest, model: Model, reader: TensorReader, rebuild: Rebuild
) -> nn.Module:
    """The model with its adapters merged into the base, in fp32 and without layers of peft.

    Raises SpecError if the base is not the one that was trained with.
    """
    module = rebuild(manifest, model)
    if base_digest(module) != manifest.base:
        raise SpecError(
            f"model: the frozen weights differ from those that step {manifest.step} was trained "
            "with; export with the same pretrained folder, on the same kind of device"
        )
    for name, parameter in state.saved_parameters(module).items():
        parameter.data.copy_(reader.read(f"{state.MODEL}.{name}"))
    for part in module.modules():
        weight = getattr(part, "weight", None)
        if isinstance(part, nn.Linear) and weight is not None and is_quantised(weight):
            part.weight = nn.Parameter(weight.data.to(torch.float32), requires_grad=False)
        elif isinstance(part.forward, StoredExperts):
            part.forward.restore(torch.float32)
    module.float()
    for layer in adapted_layers([module]):
        cast(Any, layer).merge()
    for parent in list(module.modules()):
        for name, layer in list(parent.named_children()):
            if is_adapted(layer):
                setattr(parent, name, layer.base_layer)
    return module.requires_grad_(True)


def write_merged(folder: Path, module: nn.Module, dtype: torch.dtype, shard_size: int) -> None:
    """Write a merged model as transformers does, in files of at most `shard_size` bytes.

    A model without `save_pretrained` is written as one safetensors file.
    """
    module.to(dtype)
    if hasattr(module, "save_pretrained") and hasattr(module, "config"):
        module.config.use_cache = True  # type: ignore[union-attr]
        # peft's mark: transformers would save adapters only.
        vars(module).pop("peft_config", None)
        silence_transformers()
        cast(Any, module).save_pretrained(folder, max_shard_size=shard_size)
    else:
        from safetensors.torch import save_model

        save_model(module, str(folder / "model.safetensors"))
    for file in folder.iterdir():
        sync_file(file)
