"""Checks of a model that is trained only in part, with or without Shardwise's adapters.

They need no other process: each rank builds the model and comes to the same result.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from shardwise.engine.loss import loss_of
from shardwise.engine.materialize import Materializer
from shardwise.pytorch.adapted import adapted_layers, adapter_of, base_name
from shardwise.pytorch.build import build_module
from shardwise.pytorch.parts import Parts
from shardwise.spec.dtype import DType
from shardwise.spec.lookup import Model
from shardwise.trainer.data.batches import MicroBatch
from shardwise.trials.doctor.check import Check

# With adapters, a larger trained share of the base model is a mistake.
_MOST_TRAINED = 0.5


def with_base(model: Model, dtype: DType) -> Model:
    """The model with frozen weights of `dtype` and without dropout in adapters."""
    if model.adapter is None:
        return model
    changes = {"base": dtype} if model.adapter.rank is None else {"base": dtype, "dropout": 0.0}
    return model.but(adapter=model.adapter.but(**changes))


def adapter_checks(model: Model, batch: MicroBatch) -> Iterator[Check]:
    """Yield the checks; none if all parameters are trained and there are no adapters."""
    with torch.device("meta"):
        module = build_module(model)
    if all(p.requires_grad for p in module.parameters()) and not adapted_layers([module]):
        return
    yield _frozen_base(module)
    yield _one_dtype_per_unit(module)
    yield _gradients(model, batch)


def _frozen_base(module: nn.Module) -> Check:
    """Check that the base model is frozen, except for what the settings train."""
    name = "base frozen"
    adapter = adapter_of(module)
    base = {n: p for n, p in module.named_parameters() if not _belongs_to_adapters(n)}
    trained = {n: p for n, p in base.items() if p.requires_grad}
    if adapter is not None:
        trained = {n: p for n, p in trained.items() if not adapter.trains(base_name(n))}
    total = sum(p.numel() for p in module.parameters())
    share = sum(p.numel() for p in module.parameters() if p.requires_grad) / total
    adapted = [n for n in trained if ".base_layer." in n]
    elements = sum(p.numel() for p in trained.values())
    most = _MOST_TRAINED * sum(p.numel() for p in base.values())
    if adapted or (adapted_layers([module]) and elements > most):
        first = adapted[0] if adapted else next(iter(trained))
        return Check(
            name,
            False,
            f"{first} and {len(trained) - 1} more parameters of the base are trained: their "
            "gradients and optimizer states take the memory of full fine-tuning; set their "
            "requires_grad to False",
        )
    return Check(name, True, f"{share:.2%} of all parameters are trained")


def _belongs_to_adapters(name: str) -> bool:
    # peft copies modules that it trains in full.
    return ".lora_" in name or ".modules_to_save." in name


def _one_dtype_per_unit(module: nn.Module) -> Check:
    """Check that the trained parameters of each FSDP unit have one dtype."""
    name = "one trained dtype per unit"
    parameters = dict(module.named_parameters())
    units: dict[str, dict[torch.dtype, str]] = {}
    for parameter, unit in Parts(module).owner.items():
        if parameters[parameter].requires_grad:
            dtypes = units.setdefault(unit, {})
            dtypes.setdefault(parameters[parameter].dtype, parameter)
    for unit, first in units.items():
        if len(first) > 1:
            listed = ", ".join(f"{n} is {str(d).removeprefix('torch.')}" for d, n in first.items())
            return Check(
                name,
                False,
                f"unit '{unit or 'root'}' trains several dtypes ({listed}), which FSDP cannot "
                "reduce together; convert all trained parameters to fp32",
            )
    kinds = {str(dtype).removeprefix("torch.") for first in units.values() for dtype in first}
    return Check(name, True, f"trained parameters are {' and '.join(sorted(kinds))}")


def _gradients(model: Model, batch: MicroBatch) -> Check:
    """Check that one backward gives every trained parameter a gradient."""
    name = "trained parameters get gradients"
    with torch.device("meta"):
        module = build_module(with_base(model, "fp32"))
    Materializer(module, torch.device("cpu"), torch.float32).unit([module])
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    try:
        loss_of(module)(batch.inputs, batch.targets).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        if "does not require grad" not in str(error):
            raise
    missing = [n for n, p in trained.items() if p.grad is None]
    if not missing:
        return Check(name, True, f"all {len(trained)} tensors")
    return Check(
        name,
        False,
        f"{len(missing)} of {len(trained)} have none, such as {missing[0]}; if the model uses "
        "reentrant activation checkpointing, its blocks need inputs with gradients: call "
        "model.enable_input_require_grads(), or checkpoint with use_reentrant=False",
    )
