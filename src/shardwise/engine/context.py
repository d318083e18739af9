"""Context parallelism: each process of a context group holds a part of every sequence.

Every layer but attention works on single tokens. In Ulysses' method, attention exchanges parts of
the sequence for heads by an all-to-all, so that each process attends over the full sequence with
some of the heads, and exchanges back. It is an attention function of transformers' interface:
masks, windows and packed examples are those of full sequences.

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
from shardwise.engine.sequence import full_sequence_masks
from shardwise.engine.sync import contexts_of_micro_batch
from shardwise.pytorch.private import exchange
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.units.module import TORCH_DTYPES

_MARK = "_shardwise_context"
_NUMBERS = itertools.count()


class Part(NamedTuple):
    """The part of a micro-batch on one process: inputs, targets, and keywords of the forward."""

    ids: torch.Tensor
    targets: torch.Tensor
    settings: dict[str, Any]


class ContextParallel:
    """Divides each micro-batch among the processes of a context group."""

    def __init__(self, strategy: Strategy, group: dist.ProcessGroup, device_type: str) -> None:
        self.strategy, self.group, self._device_type = strategy, group, device_type

    def part(
        self,
        model: nn.Module,
        ids: torch.Tensor,
        targets: torch.Tensor,
        positions: torch.Tensor | None,
    ) -> Part:
        """The part of a micro-batch that this process computes.

        Args:
            model: The model that the part is for.
            ids: Token ids of full sequences, (batch, sequence).
            targets: The id that follows each token, of the same shape.
            positions: Positions of packed examples; None if they are not packed.

        Raises:
            SpecError: The group size does not divide the sequence length.
        """
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
            return self._ring_part(ids, targets, where, packed, contexts_of_micro_batch(model))
        masks = full_sequence_masks(
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
        """The part of this process for ring attention.

        torch's context is entered in `entered`, until the backward is done.
        """
        from torch.distributed.tensor.experimental import context_parallel

        if packed:
            raise SpecError(
                "data.packing: ring attention has no masks, which packed examples need; set "
                'packing = false or context_method = "ulysses"'
            )
        # The context replaces each buffer by this process's part, balanced for causal attention.
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
    """Make `model` attend over full sequences while each process of `group` holds a part of them.

    Ulysses replaces the attention now; ring attention begins with `ContextParallel.part`.

    Raises:
        SpecError: The model's attention does not support it.
    """
    check_context(model, strategy, device_type)
    if strategy.context_method == "ulysses":
        model.set_attn_implementation(_registered(group))  # type: ignore[operator]
    object.__setattr__(model, _MARK, ContextParallel(strategy, group, device_type))


def context_of(model: nn.Module) -> ContextParallel | None:
    """The context parallelism of a model; None if each process has full sequences."""
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
    """Register attention that exchanges heads within `group`; return its name in transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    name = f"sdpa_context_{next(_NUMBERS)}"
    AttentionInterface.register(name, _Ulysses(group))
    AttentionMaskInterface.register(name, sdpa_mask)
    return name


class _Ulysses:
    """An attention function for transformers that exchanges parts of the sequence for heads."""

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
        """The attention output, (batch, sequence part, heads, head width), and None for weights.

        Inputs are (batch, heads, sequence part, head width).
        """
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        size = self._group.size()
        # With fewer key-value heads than processes, several processes use the same head.
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
        """Exchange (batch, heads, part, width) for (batch, some heads, sequence, width)."""
        size, (batch, heads, length, width) = self._group.size(), part.shape
        by_rank = part.reshape(batch, size, heads // size, length, width).movedim(1, 0)
        received = exchange(by_rank.contiguous(), self._group)
        return received.movedim(0, 2).reshape(batch, heads // size, size * length, width)

    def _to_parts(self, whole: torch.Tensor) -> torch.Tensor:
        """Exchange (batch, sequence, some heads, width) for (batch, part, heads, width)."""
        size, (batch, length, heads, width) = self._group.size(), whole.shape
        by_rank = whole.reshape(batch, size, length // size, heads, width).movedim(1, 0)
        received = exchange(by_rank.contiguous(), self._group)
        return received.movedim(0, 2).reshape(batch, length // size, size * heads, width)


class _Heads(NamedTuple):
    """Attributes that transformers' attention reads from its module, for exchanged heads."""

    num_key_value_groups: int
    is_causal: bool
