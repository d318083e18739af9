"""Write the config.json that Hugging Face needs with exported weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.dcp import state
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.pieces import Tensor
from shardwise.checkpoint.format.synced import write_synced
from shardwise.pytorch.build import build_module
from shardwise.spec.lookup import ConfigRef, Model, ModuleRef
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError

_GENERATION = "generation_config.json"


def model_of(manifest: Manifest) -> Model | None:
    """The model of a checkpoint, from its manifest; None if it does not name one."""
    table = manifest.run.get("model")
    if not isinstance(table, dict):
        return None
    kind = ModuleRef if "factory" in table else ModelSpec if "family" in table else ConfigRef
    # A run.toml has the adapter in a section of its own.
    if "adapter" in manifest.run:
        table = {**table, "adapter": manifest.run["adapter"]}
    return kind.read(table, where="model")


def write_config(folder: Path, model: Model | None, saved: Mapping[str, Tensor], dtype: str) -> str:
    """Write config.json and generation_config.json to `folder`.

    Returns why they were not written, or an empty string. Raises SpecError if the model built now
    differs from the saved one.
    """
    if model is None:
        return "the checkpoint does not name its model"
    if isinstance(model, ModuleRef):
        return f"{model.factory} is not a transformers model"
    check_folder(model)
    # Only names and shapes are needed.
    with torch.device("meta"):
        module: Any = build_module(model)
    check_weights_match(module, saved)
    config = module.config
    config.architectures = [type(module).__name__]
    config.dtype = getattr(torch, dtype)
    # Generation needs the cache of keys and values that training turns off.
    config.use_cache = True
    write_synced(folder / "config.json", config.to_json_string().encode())
    if module.can_generate():
        given = _model_file(model, _GENERATION)
        text = given.read_bytes() if given else module.generation_config.to_json_string().encode()
        write_synced(folder / _GENERATION, text)
    return ""


def check_folder(model: Model) -> None:
    """Raise SpecError if the config.json that the model is built from does not exist."""
    config = getattr(model, "config", None)
    if config is not None and not Path(config).exists():
        raise SpecError(
            f"model: {config} does not exist; run this command in the folder in which "
            "training was started"
        )


def _model_file(model: ModelSpec | ConfigRef, name: str) -> Path | None:
    """A file in the folder of the model's config.json; None if it does not exist."""
    if model.config is None:
        return None
    path = Path(model.config)
    file = (path if path.is_dir() else path.parent) / name
    return file if file.is_file() else None


def check_weights_match(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Raise SpecError unless names and shapes of the saved weights match the model."""
    weights = {f"{state.MODEL}.{name}": p for name, p in state.saved_parameters(module).items()}
    now = {name: tuple(t.shape) for name, t in {**weights, **state.buffers_of(module)}.items()}
    before = {
        name: tensor.shape for name, tensor in saved.items() if name.startswith(f"{state.MODEL}.")
    }
    for name in [*now, *before]:
        if now.get(name) != before.get(name):
            was, built_as = (_shape(table.get(name)) for table in (before, now))
            raise SpecError(
                f"model: {name.partition('.')[2]} {was} in the checkpoint and {built_as} in the "
                "model built now; use the config.json and transformers version of the training"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    """Words for a shape in a sentence: "has shape [2, 3]"; None: "is missing"."""
    return "is missing" if shape is None else f"has shape {list(shape)}"
