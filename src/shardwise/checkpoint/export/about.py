"""What Hugging Face needs beside weights: which model they are of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.checkpoint.dcp import state
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.pieces import Saved
from shardwise.checkpoint.format.synced import write_synced
from shardwise.spec.lookup import ConfigRef, Model, ModuleRef
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError
from shardwise.units.build import build_module

_GENERATION = "generation_config.json"


def model_of(told: Manifest) -> Model | None:
    """The model that was trained, as the checkpoint itself says; None where it does not."""
    table = told.run.get("model")
    if not isinstance(table, dict):
        return None
    kind = ModuleRef if "factory" in table else ModelSpec if "family" in table else ConfigRef
    return kind.read(table, where="model")


def write_about(folder: Path, model: Model | None, saved: Saved, dtype: str) -> str:
    """Write config.json and generation_config.json; or why not, in a few words.

    Raises SpecError where the model that is built now is not the one that was saved.
    """
    if model is None:
        return "the checkpoint does not say which model it is of"
    if isinstance(model, ModuleRef):
        return f"{model.factory} is no model of transformers"
    if model.config is not None and not Path(model.config).exists():
        raise SpecError(
            f"model: {model.config} is not there; start this where the training was started"
        )
    # Names and shapes are all that is looked at.
    with torch.device("meta"):
        module: Any = build_module(model)
    _compare(module, saved)
    config = module.config
    config.architectures = [type(module).__name__]
    config.dtype = getattr(torch, dtype)
    # Training has no use for a cache of keys and values, but whoever generates has.
    config.use_cache = True
    write_synced(folder / "config.json", config.to_json_string().encode())
    if module.can_generate():
        given = _beside(model, _GENERATION)
        text = given.read_bytes() if given else module.generation_config.to_json_string().encode()
        write_synced(folder / _GENERATION, text)
    return ""


def _beside(model: ModelSpec | ConfigRef, name: str) -> Path | None:
    """A file in the folder that a model was taken from."""
    if model.config is None:
        return None
    path = Path(model.config)
    found = (path if path.is_dir() else path.parent) / name
    return found if found.is_file() else None


def _compare(module: nn.Module, saved: Saved) -> None:
    """Whether weights are those of a model, tied ones once."""
    weights = {f"{state.MODEL}.{name}": p for name, p in state.parameters_of(module).items()}
    now = {name: tuple(t.shape) for name, t in {**weights, **state.buffers_of(module)}.items()}
    before = {
        name: tensor.shape
        for name, tensor in saved.tensors.items()
        if name.startswith(f"{state.MODEL}.")
    }
    for name in [*now, *before]:
        if now.get(name) != before.get(name):
            was, built_as = (_shape(table.get(name)) for table in (before, now))
            raise SpecError(
                f"model: {name.partition('.')[2]} {was} in the checkpoint and {built_as} in what "
                "is built now; export with the config.json and transformers of the training"
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "is not there" if shape is None else f"is {list(shape)}"
