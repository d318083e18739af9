"""The base class of modes that see every operation of a step: counters, ledgers, recorders."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch

from shardwise.pytorch.private import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Calls `observe` after every operation that runs while it is entered."""

    # Classes of tensors whose operations are not observed: they dispatch again, on plain tensors.
    composed_of_plain: ClassVar[frozenset[type]] = frozenset()

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def observe(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        """Called with each operation after it has run, its arguments and its result."""
        raise NotImplementedError

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation; a mode may run it in another way."""
        return func(*args, **kwargs)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run one operation, then observe it."""
        if not self.composed_of_plain.isdisjoint(types):
            return NotImplemented
        kwargs = kwargs or {}
        out = self.run(func, args, kwargs)
        self.observe(func, args, kwargs, out)
        return out


def leaves(value: Any) -> Iterator[Any]:
    """Yield all values inside nested lists, tuples and dicts.

    Arguments of an operation have no other containers.
    """
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from leaves(one)
    elif isinstance(value, dict):
        yield from leaves(tuple(value.values()))
    else:
        yield value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors inside the arguments or results of an operation."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, torch.Tensor)]
