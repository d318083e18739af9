"""Build the nn.Module of a run, on the device of the caller's context."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardwise.pytorch.adapted import adapt
from shardwise.pytorch.quiet_libraries import quiet_imports, silence_transformers
from shardwise.spec.hub import stay_offline
from shardwise.spec.huggingface import config_table, to_config
from shardwise.spec.lookup import Model, ModuleRef, config_folder
from shardwise.spec.record import SpecError


def build_module(model: Model) -> nn.Module:
    """Build a module in training mode and fp32, with initial weights and the run's adapters."""
    if isinstance(model, ModuleRef):
        module = _from_factory(model.factory)
    else:
        module = _from_transformers(model)
    return module if model.adapter is None else adapt(module, model.adapter).train()


def find_function(reference: str, what: str) -> Any:
    """Import the function `package.module:name`, also from the working directory.

    `what` is the setting that names it, for the error message.
    """
    module_name, _, function = reference.partition(":")
    folder = os.getcwd()
    # The folder comes first while the module and its imports are loaded, and last afterwards: then
    # its files cannot replace an installed library that is imported later.
    sys.path[:] = [folder, *(path for path in sys.path if path != folder)]
    try:
        with quiet_imports():
            return getattr(importlib.import_module(module_name), function)
    except (ImportError, AttributeError) as error:
        raise SpecError(f"{what}: cannot import {reference}: {error}") from None
    finally:
        sys.path.remove(folder)
        sys.path.append(folder)


def _from_factory(factory: str) -> nn.Module:
    """The module that the function returns; raises SpecError if it fails."""
    make = find_function(factory, "model")
    try:
        with quiet_imports():
            module = make()
    except Exception as error:
        raise SpecError(f"model: {factory} failed: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise SpecError(f"model: {factory} returned {type(module).__name__}, not an nn.Module")
    return module.train()


def _from_transformers(model: Any) -> nn.Module:
    """The model that transformers builds from a config, with random weights."""
    stay_offline()
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError:
        raise SpecError(
            f"model: building {model.name} needs transformers; install it with "
            "'pip install shardwise[hf]'"
        ) from None
    silence_transformers()
    try:
        if model.config is None:
            config = AutoConfig.for_model(**to_config(model))  # type: ignore[arg-type]
        else:
            folder = config_folder(model.config)
            config = AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        # The modules of the model are imported only now.
        with quiet_imports():
            module: nn.Module = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                config, attn_implementation="sdpa", dtype=torch.float32, trust_remote_code=False
            )
    except (ValueError, KeyError, OSError, ImportError) as error:
        if model.config is not None and "auto_map" in config_table(Path(model.config)):
            raise SpecError(
                f"model: {model.name} is made by code in its own folder, which is never run; write "
                "a function that returns the nn.Module, and give it as --model package.module:name"
            ) from error
        reason = str(error).strip().splitlines()[0]
        raise SpecError(f"model: transformers cannot build {model.name}: {reason}") from error
    module.config.use_cache = False  # type: ignore[union-attr]
    return module.train()
