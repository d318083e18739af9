"""AdamW with quantised states or stochastic rounding on local shards, from torchao.

Each shard is quantised in blocks of its own elements, so that where blocks begin depends on how a
parameter is sharded: runs on different numbers of shards agree only within the rounding of states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor, Shard

from shardwise.engine.noise import seeded
from shardwise.pytorch.private import local_tensor
from shardwise.pytorch.quiet_libraries import quiet_imports
from shardwise.spec.optimizer import LOW_BIT, LowBit, Optimizer
from shardwise.spec.record import SpecError

_TORCHAO: dict[Optimizer, str] = {
    "adamw-8bit": "AdamW8bit",
    "adamw-4bit": "AdamW4bit",
    "adamw-fp8": "AdamWFp8",
    # For stochastic rounding only: their states are not quantised here.
    "adamw": "AdamW8bit",
    "adam": "Adam8bit",
}
# Inner tensors of a quantised state that are saved; the table of values is constant.
_SAVED = ("codes", "scale")


def make_low_bit(
    kind: Optimizer,
    groups: list[dict[str, Any]],
    *,
    stochastic_seed: int | None = None,
    **settings: Any,
) -> torch.optim.Optimizer:
    """torchao's AdamW of this kind for parameter groups of plain tensors or DTensors.

    With `stochastic_seed`, updates of bf16 parameters are rounded stochastically.
    """
    try:
        with quiet_imports():
            from torchao import optim
    except ImportError:
        raise SpecError(
            f"job.optimizer: {kind}{' with stochastic rounding' * (kind not in LOW_BIT)} needs "
            "torchao; install it with 'pip install shardwise[adapters]'"
        ) from None
    adamw = getattr(optim, _TORCHAO[kind])
    made: type[torch.optim.Optimizer] = type(adamw.__name__, (_LowBit, adamw), {})
    settings["bf16_stochastic_round"] = stochastic_seed is not None
    optimizer = made(groups, **settings)
    optimizer.low_bit = LOW_BIT.get(kind)  # type: ignore[attr-defined]
    optimizer.stochastic_seed = stochastic_seed  # type: ignore[attr-defined]
    return optimizer


class _LowBit:
    """Adds cancelled updates, empty states, small shards and seeds to torchao's optimizers."""

    # None if states are not quantised.
    low_bit: LowBit | None
    # None without stochastic rounding.
    stochastic_seed: int | None
    # A nonzero value cancels the update.
    found_inf: torch.Tensor | None = None
    param_groups: list[dict[str, Any]]
    state: Mapping[torch.Tensor, Mapping[str, Any]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters, unless `found_inf` cancels it."""
        if is_cancelled(self.found_inf):
            return None
        with _eager_on_cpu(self.param_groups), self._noise():
            return super().step(closure)  # type: ignore[misc]

    def _noise(self) -> AbstractContextManager[Any]:
        """A context with the random numbers of this update; empty without stochastic rounding."""
        if self.stochastic_seed is None:
            return nullcontext()
        parameters = [p for group in self.param_groups for p in group["params"]]
        updates = next((int(state["step"]) for state in self.state.values() if state), 0)
        return seeded(parameters[0], self.stochastic_seed, updates)

    def new_state(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        """The initial state of a parameter, such as for loading saved values into."""
        return {
            "step": torch.tensor(0.0),
            "exp_avg": self._new_buffer(parameter, True),
            "exp_avg_sq": self._new_buffer(parameter, False),
        }

    def _new_buffer(self, p: torch.Tensor, signed: bool) -> torch.Tensor:
        """A state of zeros; quantised only if the largest and smallest shards allow it."""
        if self.low_bit is None or not self.low_bit.quantises(_shard_numels(p)):
            return torch.zeros_like(p)
        buffer: torch.Tensor = super()._new_buffer(p, signed)  # type: ignore[misc]
        return buffer

    def _subclass_zeros(self, p: torch.Tensor, signed: bool, block_size: int) -> torch.Tensor:
        """A quantised state of zeros that appears as fp32."""
        zeros: torch.Tensor = super()._subclass_zeros(p, signed, block_size)  # type: ignore[misc]
        # The dtype of a quantised state says nothing about its storage. torchao computes in fp32
        # and cannot update a DTensor state that has the dtype bf16 of the master weights.
        return zeros.to(torch.float32)


def is_cancelled(found_inf: torch.Tensor | None) -> bool:
    """Whether an update must be skipped; waits for the device.

    Only fused optimizers can cancel an update without the host.
    """
    return found_inf is not None and bool(found_inf)


def _eager_on_cpu(groups: list[dict[str, Any]]) -> AbstractContextManager[Any]:
    """A context that runs the update eagerly, not compiled, if all parameters are on a CPU.

    torchao compiles the update for every shape of parameter. That is what makes it fast on a GPU;
    on a CPU compiling takes minutes and needs a C++ compiler.
    """
    on_cpu = all(p.device.type == "cpu" for group in groups for p in group["params"])
    return torch.compiler.set_stance("force_eager") if on_cpu else nullcontext()


def _shard_numels(parameter: torch.Tensor) -> tuple[int, int]:
    """The number of elements of the largest and of the smallest shard of a parameter."""
    if not isinstance(parameter, DTensor):
        return parameter.numel(), parameter.numel()
    most, least = list(parameter.shape), list(parameter.shape)
    for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True):
        if isinstance(placement, Shard):
            rows = parameter.shape[placement.dim]
            most[placement.dim] = -(-rows // size)
            least[placement.dim] = max(0, rows - (size - 1) * most[placement.dim])
    return math.prod(most), math.prod(least)


# ---- checkpoints ----------------------------------------------------------------------------


class _Part(NamedTuple):
    """An inner tensor of a quantised state in its saved form: `rows` has one row per shard."""

    name: str
    inner: torch.Tensor
    rows: torch.Tensor


def saved_parts(state: torch.Tensor) -> Mapping[str, torch.Tensor]:
    """The tensors to save for a quantised state, by name; empty for any other tensor."""
    return {part.name: part.rows for part in _parts(state)}


def restore_parts(state: torch.Tensor, loaded: Mapping[str, torch.Tensor]) -> None:
    """Copy loaded parts into a quantised state, as they may be no views of it."""
    for part in _parts(state):
        row = local_tensor(loaded[part.name]).reshape(-1)[: part.inner.numel()]
        part.inner.view(-1).view(row.dtype).copy_(row)


def _parts(state: torch.Tensor) -> Iterator[_Part]:
    """The saved parts of a quantised state; none for any other tensor."""
    local = local_tensor(state)
    if not hasattr(local, "__tensor_flatten__"):
        return
    largest, _ = _shard_numels(state)
    for name in _SAVED:
        inner = getattr(local, name)
        row = inner.detach().view(-1)
        # Some checkpoint readers do not support 8-bit floats, so bytes are saved.
        row = row.view(torch.uint8) if row.element_size() == 1 else row
        # The last ranks may have smaller shards, so all rows are padded to the longest.
        length = row.numel() * largest // local.numel()
        row = torch.nn.functional.pad(row, (0, length - row.numel())) if length > len(row) else row
        yield _Part(name, inner, _as_row(row, state))


def _as_row(row: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """The matrix with one row per shard, of which this rank holds `row`.

    A DTensor on the mesh of `state`, or a plain tensor of one row if `state` is no DTensor.
    """
    if not isinstance(state, DTensor):
        return row.view(1, -1)
    placed = list(zip(state.device_mesh.shape, state.placements, strict=True))
    shards = math.prod(size for size, placement in placed if isinstance(placement, Shard))
    return DTensor.from_local(
        row.view(1, -1),
        state.device_mesh,
        [Shard(0) if isinstance(placement, Shard) else placement for _, placement in placed],
        run_check=False,
        shape=torch.Size((shards, row.numel())),
        stride=(row.numel(), 1),
    )
