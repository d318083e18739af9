"""Trace each kind of block once: blocks that equal an earlier one pass their input on.

A model has dozens of equal blocks, and a trace takes time for each. The first and the last block of
a kind run; those between them only hand the hidden state on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

# Attributes that differ between blocks without changing what they compute.
_POSITION = frozenset(("layer_idx", "layer_id", "layer_index", "layer_number", "idx"))
_PLAIN = (bool, int, float, str, type(None))


def repeated_blocks(module: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, str]:
    """Names of the blocks that need not run, each with the equal block that runs.

    Only of models of transformers, whose blocks all take and return the hidden state.
    """
    if not hasattr(getattr(module, "config", None), "get_text_config"):
        return {}
    lists = _lists_by_block(module, len(blocks))
    kinds: dict[object, list[str]] = {}
    for index, (name, block) in enumerate(blocks.items()):
        kinds.setdefault((_signature(block), *(one[index] for one in lists)), []).append(name)
    return {name: names[-1] for names in kinds.values() for name in names[1:-1]}


@contextmanager
def skipping(module: nn.Module, skipped: Mapping[str, str]) -> Iterator[None]:
    """While entered, each block of `skipped` returns its hidden state unchanged."""
    returned: dict[type, Any] = {}
    patched = [module.get_submodule(name) for name in skipped]
    classes = {type(block) for block in patched}
    handles = [
        running.register_forward_hook(_remember(returned))
        for running in module.modules()
        if type(running) in classes and running not in set(patched)
    ]
    for block in patched:
        block.forward = _identity(type(block), returned)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for block in patched:
            del block.forward


def _remember(returned: dict[type, Any]) -> Callable[..., None]:
    """A forward hook that remembers what blocks of a class return beside the hidden state."""

    def hook(block: nn.Module, _: Any, output: Any) -> None:
        rest = output[1:] if isinstance(output, (tuple, list)) else None
        returned[type(block)] = None if rest is None else tuple(_detached(value) for value in rest)

    return hook


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _identity(kind: type, returned: Mapping[type, Any]) -> Callable[..., Any]:
    """A forward that returns its first argument in the form in which blocks of `kind` return."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs.get("hidden_states", next(iter(kwargs.values()), None))
        rest = returned.get(kind)
        return hidden if rest is None else (hidden, *rest)

    return forward


def _signature(block: nn.Module) -> object:
    """What decides a block's computation: classes, shapes and plain attributes of its modules."""
    modules = tuple(
        (
            name,
            type(part),
            tuple(
                sorted(
                    (key, repr(value))
                    for key, value in vars(part).items()
                    if isinstance(value, (*_PLAIN, list, tuple)) and key not in _POSITION
                )
            ),
        )
        for name, part in block.named_modules()
    )
    parameters = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in block.named_parameters()
    )
    return modules, parameters


def _lists_by_block(module: nn.Module, count: int) -> list[list[Any]]:
    """The lists of a model's configuration that have a plain value for each block."""
    config: Any = getattr(module, "config", None)
    if config is None:
        return []
    configs = [config, *(v for v in vars(config).values() if hasattr(v, "to_diff_dict"))]
    return [
        list(value)
        for one in configs
        for value in vars(one).values()
        if isinstance(value, (list, tuple))
        and len(value) == count
        and all(isinstance(x, _PLAIN) for x in value)
    ]
