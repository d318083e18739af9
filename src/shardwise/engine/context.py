"""Context parallelism: each process of a context group has a part of every sequence.

Everything but attention works on single tokens. In Ulysses' method, attention exchanges parts of
the sequence for heads by an all-to-all, so that each process attends over the whole sequence with
some of the heads, and back. It is an attention function of transformers' interface: masks, windows
and packed examples are those of whole sequences.

Ring attention is torch's own `context_parallel`. It needs kernels that torch has for GPUs only, and
has not been run by our tests.
"""

from __future__ import annotations

import itertools
import math
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from shardwise.engine.packing import packed_settings
from shardwise.engine.sequence import whole_masks
from shardwise.engine.sync import left_after_backward
from shardwise.engine.torch_private import exchange
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.units.module import TORCH_DTYPES

_MARK = "_shardwise_context"
_NUMBERS = itertools.count()


class Part(NamedTuple):
    """What one process sees of a micro-batch: inputs, targets, and settings of the forward."""

    ids: torch.Tensor
    targets: torch.Tensor
    settings: dict[str, Any]


class ContextParallel:
    """How a model's processes divide sequences among them."""

    def __init__(self, strategy: Strategy, group: dist.ProcessGroup, device_type: str) -> None:
        self.strategy, self.group, self._device_type = strategy, group, device_type

    def part(
        self,
        model: nn.Module,
        ids: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | None,
    ) -> Part:
        """The part of this process."""
        size = self.group.size()
        if ids.shape[1] % size:
            raise SpecError(
                f"strategy.context: {size} does not divide the sequence length {ids.shape[1]}; "
                "choose one that it divides"
            )
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        packed = packed_settings(inner, positions)
        where = positions
        if where is None:
            where = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
        if self.strategy.context_method == "ring":
            return self._ring_part(ids, targets, where, packed, left_after_backward(model))
        masks = whole_masks(
            inner.config,
            ids,
            where,
            packed.get("attention_mask"),
            TORCH_DTYPES[self.strategy.param_dtype],
        )
        rank = self.group.rank()
        mine = [whole.chunk(size, dim=1)[rank].contiguous() for whole in (ids, targets, where)]
        settings = {"position_ids": mine[2], "attention_mask": masks, "use_cache": False}
        return Part(mine[0], mine[1], settings)

    def _ring_part(
        self,
        ids: torch.Tensor,
        targets: torch.Tensor,
        where: torch.Tensor,
        packed: dict[str, Any],
        entered: ExitStack,
    ) -> Part:
        from torch.distributed.tensor.experimental import context_parallel

        if packed:
            raise SpecError(
                "data.packing: ring attention has no masks, which packed examples need; set "
                'packing = false or context_method = "ulysses"'
            )
        # They become parts in place, in an order that gives every process the same work.
        buffers = [ids.clone(), targets.clone(), where.clone()]
        mesh = DeviceMesh.from_group(self.group, self._device_type)
        entered.enter_context(
            context_parallel(
                mesh,
                buffers=buffers,
                buffer_seq_dims=[1] * len(buffers),
                no_restore_buffers=set(buffers),
            )
        )
        # A mask of ones keeps transformers from reading the jump in positions as packed examples.
        settings = {"attention_mask": torch.ones_like(buffers[0]), "use_cache": False}
        return Part(buffers[0], buffers[1], {**settings, "position_ids": buffers[2]})


def divide_sequences(
    model: nn.Module, strategy: Strategy, group: dist.ProcessGroup, device_type: str
) -> None:
    """Let `model` attend over whole sequences of which each process of `group` has a part.

    Raises:
        SpecError: The model's attention cannot be divided so.
    """
    check_context(model, strategy, device_type)
    if strategy.context_method == "ulysses":
        model.set_attn_implementation(_registered(group))  # type: ignore[operator]
    object.__setattr__(model, _MARK, ContextParallel(strategy, group, device_type))


def context_of(model: nn.Module) -> ContextParallel | None:
    """How the model's processes divide sequences; None if each has whole ones."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    found: ContextParallel | None = getattr(inner, _MARK, None)
    return found


def check_context(model: nn.Module, strategy: Strategy, device_type: str) -> None:
    """Raise SpecError if the model cannot be trained with this context parallelism."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "set_attn_implementation"):
        raise SpecError(
            f"strategy.context: {type(model).__name__} is not a model of transformers, whose "
            "attention can be exchanged; set context to 1"
        )
    if strategy.context_method == "ring" and device_type == "cpu":
        raise SpecError(
            "strategy.context_method: ring attention of torch does not run on CPUs; use ulysses"
        )
    attention = getattr(config, "_attn_implementation", None)
    if attention != "sdpa":
        raise SpecError(
            f"strategy.context: needs attn_implementation sdpa; the model has {attention}"
        )
    heads = config.get_text_config().num_attention_heads // strategy.tensor
    if strategy.context_method == "ulysses" and heads % strategy.context:
        left = f" that tensor {strategy.tensor} leaves a process" if strategy.tensor > 1 else ""
        raise SpecError(
            f"strategy.context: {strategy.context} does not divide the {heads} attention "
            f'heads{left}; choose one that does, or context_method = "ring"'
        )


def _registered(group: dist.ProcessGroup) -> str:
    """The name under which transformers knows attention that exchanges heads within `group`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    name = f"sdpa_context_{next(_NUMBERS)}"
    AttentionInterface.register(name, _Ulysses(group))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


class _Ulysses:
    """An attention function of transformers: exchanges parts of the sequence for heads."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **settings: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attend; tensors are (batch, heads, part of the sequence, width of a head)."""
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        size = self._group.size()
        # Where there are fewer key-value heads than processes, several processes use one.
        repeats = size // math.gcd(key.shape[1], size)
        if repeats > 1:
            key, value = (one.repeat_interleave(repeats, dim=1) for one in (key, value))
        query, key, value = (self._to_heads(one) for one in (query, key, value))
        whole, _ = sdpa_attention_forward(
            _Heads(query.shape[1] // key.shape[1], getattr(module, "is_causal", True)),  # type: ignore[arg-type]
            query,
            key,
            value,
            attention_mask,
            **settings,
        )
        return self._to_parts(whole), None

    def _to_heads(self, part: torch.Tensor) -> torch.Tensor:
        """From all heads of a part of the sequence to some heads of all of it."""
        size, (batch, heads, length, width) = self._group.size(), part.shape
        by_rank = part.reshape(batch, size, heads // size, length, width).movedim(1, 0)
        received = exchange(by_rank.contiguous(), self._group)
        return received.movedim(0, 2).reshape(batch, heads // size, size * length, width)

    def _to_parts(self, whole: torch.Tensor) -> torch.Tensor:
        """Back: (batch, sequence, some heads, width) to (batch, part, all heads, width)."""
        size, (batch, length, heads, width) = self._group.size(), whole.shape
        by_rank = whole.reshape(batch, size, length // size, heads, width).movedim(1, 0)
        received = exchange(by_rank.contiguous(), self._group)
        return received.movedim(0, 2).reshape(batch, length // size, size * heads, width)


class _Heads(NamedTuple):
    """What transformers' attention reads of its module: there may be more key-value heads."""

    num_key_value_groups: int
    is_causal: bool
