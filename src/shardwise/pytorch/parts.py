"""The structure of a module that sharding needs, each part computed once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import nn

from shardwise.pytorch.adapted import adapter_of
from shardwise.pytorch.blocks import find_blocks, owners, parameter_names
from shardwise.spec.adapter import Adapter


class Parts:
    """The blocks, parameters and adapter of a module, as they are before it is sharded."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @cached_property
    def adapter(self) -> Adapter | None:
        return adapter_of(self.module)

    @cached_property
    def blocks(self) -> dict[str, nn.Module]:
        """The repeated blocks by name; raises SpecError if there are none."""
        return find_blocks(self.module)

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by name; a tied one appears under each of its names."""
        return dict(self.module.named_parameters(remove_duplicate=False))

    @cached_property
    def aliases(self) -> list[list[str]]:
        """All names of each parameter; a tied one has several."""
        return list(parameter_names(self.module).values())

    @cached_property
    def owner(self) -> dict[str, str]:
        """The name of the block that owns each parameter, by its first name; '' is the root.

        The root also owns each parameter that several units share.
        """
        return owners(self.module, self.blocks)

    @property
    def tied_shapes(self) -> set[tuple[int, ...]]:
        """The shapes of tied parameters."""
        return {tuple(self.parameters[n[0]].shape) for n in self.aliases if len(n) > 1}

    @property
    def master_dtype(self) -> torch.dtype | None:
        """The dtype of the first trained parameter, which is the master dtype; None without one.

        Frozen parameters of the same dtype follow it; others keep their own. With adapters in fp32,
        peft trains copies of modules in the dtype of the base.
        """
        return next((p.dtype for p in self.module.parameters() if p.requires_grad), None)

    def one_by_one(self) -> Iterator[list[nn.Module]]:
        """Yield [block] for each block, then [module], which stands for the rest."""
        yield from ([block] for block in self.blocks.values())
        yield [self.module]
