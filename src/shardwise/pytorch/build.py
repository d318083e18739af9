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
from shardwise.pytorch.from_config import model_from_config
from shardwise.pytorch.quiet_libraries import quiet_imports
from shardwise.spec.huggingface import config_table, to_config
from shardwise.spec.lookup import Model, ModuleRef
from shardwise.spec.record import SpecError


def build_module(model: Model) -> nn.Module:
    """Build a module in training mode and fp32, with initial weights and the run's adapters."""
    if isinstance(model, ModuleRef):
        module = _from_factory(model.factory)
    else:
        table = to_config(model) if model.config is None else config_table(Path(model.config))
        # Flex attention knows sinks and trained biases, which scaled_dot_product_attention lacks.
        fused = ("sdpa", "flex_attention") if torch.cuda.is_available() else ("sdpa",)
        module = model_from_config(table, model.name, (*fused, "eager"))
    return module if model.adapter is None else adapt(module, model.adapter).train()


def with_exact_experts(module: nn.Module) -> nn.Module:
    """Set a module to compute experts one by one, as fp64 needs, and return it.

    The grouped products of transformers' experts take low precision only; its loop over experts is
    the same function in any precision.
    """
    for part in module.modules():
        choose: Any = getattr(part, "set_experts_implementation", None)
        if choose is not None:
            choose("eager")
            break
    return module


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
