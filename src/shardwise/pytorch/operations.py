"""The cost of an operation: its FLOPs, the storages it touches, and which run as one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from shardwise.pytorch.dispatch import tensors_in
from shardwise.pytorch.private import CPU_ATTENTION, GROUPED_MATMUL, is_mutable, storage_id


@dataclass
class Elementwise:
    """One element-wise kernel: bytes of the storages it reads and writes, by storage number."""

    reads: dict[int, int]
    writes: dict[int, int]
    # A cast is a separate kernel.
    cast: bool


def fused_cost(operations: list[Elementwise], saved: set[int]) -> tuple[int, float]:
    """(kernels, bytes) of element-wise operations, merged as the formulas count them.

    `saved` are the numbers of storages that autograd saves. Coefficients were fitted with the
    formulas of `decoder`, which count rotary embeddings or the mean square of a norm as one
    operation. So operations are merged into one kernel if autograd does not save the result between
    them and only element-wise operations read it.
    """
    readers: dict[int, list[int]] = {}
    for index, operation in enumerate(operations):
        for number in operation.reads:
            readers.setdefault(number, []).append(index)
    kernel = list(range(len(operations)))

    def root(index: int) -> int:
        while kernel[index] != index:
            index = kernel[index]
        return index

    inner: set[int] = set()
    for index, operation in enumerate(operations):
        for number in operation.writes:
            after = [i for i in readers.get(number, []) if i > index]
            casts = operation.cast or any(operations[i].cast for i in after)
            if number in saved or not after or casts:
                continue
            inner.add(number)
            for reader in after:
                kernel[root(reader)] = root(index)
    touched: dict[tuple[int, int, bool], int] = {}
    for index, operation in enumerate(operations):
        for writes, sizes in ((False, operation.reads), (True, operation.writes)):
            for number, size in sizes.items():
                if number not in inner:
                    key = (root(index), number, writes)
                    touched[key] = max(touched.get(key, 0), size)
    kernels = len({root(index) for index in range(len(operations))})
    return kernels, float(sum(touched.values()))


def is_view(func: Any, operands: Any, made: list[torch.Tensor]) -> bool:
    """Whether an operation runs no kernel: its results `made` share the storages of its inputs."""
    if is_mutable(func):
        return False
    given = {storage_key(t) for t in tensors_in(operands)}
    return all(storage_key(tensor) in given for tensor in made)


def touched_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that a kernel reads or writes: at most those of its storage."""
    return min(tensor.numel() * tensor.itemsize, storage_size(tensor))


def storage_key(tensor: torch.Tensor) -> int:
    """The identity of the tensor's storage while it is alive."""
    return storage_id(tensor.untyped_storage())


def storage_size(tensor: torch.Tensor) -> int:
    """Bytes of the tensor's storage."""
    return tensor.untyped_storage().nbytes()


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """FLOPs of an operation that has run; 0 if torch's registry does not count it.

    The CPU's fused attention and grouped matmuls are counted in addition.
    """
    if func is CPU_ATTENTION:
        query, key, value = args[:3]
        shapes = (query.shape, _expanded_shape(key, query), _expanded_shape(value, query))
        return float(sdpa_flop_count(*shapes))  # type: ignore[no-untyped-call]
    if func.overloadpacket is GROUPED_MATMUL:
        # Every row is multiplied with the matrix of one expert; in the backward every row adds to
        # the gradient of one expert's matrix.
        made = out if args[1].ndim == 3 else out[0]
        return 2.0 * float(made.numel()) * float(args[0].shape[-1])
    count = flop_registry.get(func.overloadpacket)
    return float(count(*args, **kwargs, out_val=out)) if count is not None else 0.0


def _expanded_shape(tensor: torch.Tensor, like: torch.Tensor) -> torch.Size:
    """The shape of keys or values after expansion to all query heads (GQA)."""
    return torch.Size((tensor.shape[0], like.shape[1], *tensor.shape[2:]))
