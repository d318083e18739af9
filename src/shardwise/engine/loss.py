"""The loss: cross entropy over all tokens at once (plain) or chunk by chunk (chunked).

The plain loss holds the logits of a micro-batch, tokens × vocabulary, several times. The chunked
loss holds the logits of one chunk of tokens. It computes the gradients of the hidden states and of
the head together with the loss, in the forward pass, so that no chunk's logits are kept or computed
twice. The backward pass only scales these gradients.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from shardwise.engine.balance import Balance
from shardwise.engine.context import Part, context_of
from shardwise.engine.head_with_loss import IGNORED, HeadWithLoss, apply_head_with_loss
from shardwise.engine.packing import packed_settings
from shardwise.engine.sync import is_parallel, strategy_of
from shardwise.spec.train import BalanceLoss

# A function from hidden states, (1, tokens, width), to logits.
ChunkLogits = Callable[[torch.Tensor], torch.Tensor]


class LossSum(Protocol):
    """A function from token ids and targets (the next ids) to the loss summed over tokens.

    `positions` are given for packed examples, and start at 0 for each: see engine/packing.py.
    """

    def __call__(
        self, ids: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor: ...


class Logits(Protocol):
    """A function from token ids, (batch, sequence), to logits, (batch, sequence, vocabulary)."""

    def __call__(
        self, ids: torch.Tensor, positions: torch.Tensor | None = None
    ) -> torch.Tensor: ...


def loss_of(model: nn.Module, balance_loss: BalanceLoss = "none") -> LossSum:
    """Return a function from token ids and targets to the loss, summed over tokens.

    The model's strategy decides how it is computed; without a strategy it is plain. With
    `balance_loss`, the auxiliary loss of a mixture's routers is added for each token.
    """
    in_head = is_parallel(model) and strategy_of(model).loss != "plain"
    if balance_loss != "none":
        inner = model.module if isinstance(model, DistributedDataParallel) else model
        balance = Balance(inner, balance_loss)
        return functools.partial(_sum_with_balance, model, balance=balance, in_head=in_head)
    return functools.partial(_sum_of_head if in_head else _plain_sum, model)


def logits_of(model: nn.Module) -> Logits:
    """Return a function from token ids to logits, for transformers models and other modules."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model

    def forward(ids: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
        return _logits(model, ids, packed_settings(inner, positions))

    return forward


def _logits(model: nn.Module, ids: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """Run the forward; return the logits, (batch, sequence, vocabulary)."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    named = "input_ids" in inspect.signature(inner.forward).parameters or hasattr(inner, "config")
    output = model(input_ids=ids, **settings) if named else model(ids, **settings)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
        raise TypeError(
            f"{type(inner).__name__} returned {type(output).__name__}; the trainer needs "
            "logits of shape (batch, sequence, vocabulary)"
        )
    return logits


def _part(
    model: nn.Module,
    ids: torch.Tensor,
    targets: torch.Tensor,
    positions: torch.Tensor | None,
) -> Part:
    """The part of a micro-batch for this process; all of it without context parallelism."""
    context = context_of(model)
    if context is not None:
        return context.part(model, ids, targets, positions)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    return Part(ids, targets, packed_settings(inner, positions))


def _plain_sum(
    model: nn.Module,
    ids: torch.Tensor,
    targets: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss summed over tokens, from all logits at once."""
    part = _part(model, ids, targets, positions)
    # One expression, so that no variable keeps the logits alive during the backward pass.
    loss = _cross_entropy(
        _logits(model, part.ids, part.settings).flatten(0, 1), part.targets.flatten()
    )
    # With logits sharded by vocabulary, every process has the full loss.
    return loss.to_local() if isinstance(loss, DTensor) else loss


def _sum_of_head(
    model: nn.Module,
    ids: torch.Tensor,
    targets: torch.Tensor,
    positions: torch.Tensor | None = None,
) -> torch.Tensor:
    """The loss summed over tokens, from a model whose head computes it."""
    part = _part(model, ids, targets, positions)
    labels = {"shift_labels": part.targets, "num_items_in_batch": 1}
    loss: torch.Tensor = model(input_ids=part.ids, **labels, **part.settings).loss
    return loss


def _sum_with_balance(
    model: nn.Module,
    ids: torch.Tensor,
    targets: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    balance: Balance,
    in_head: bool,
) -> torch.Tensor:
    """The loss summed over tokens, with the auxiliary loss of routers."""
    part = _part(model, ids, targets, positions)
    labels = {"shift_labels": part.targets, "num_items_in_batch": 1} if in_head else {}
    output = model(input_ids=part.ids, **labels, **part.settings, **balance.settings)
    added = balance.of(output, (part.targets != IGNORED).sum())
    if in_head:
        total: torch.Tensor = output.loss + added
        return total
    return _cross_entropy(output.logits.flatten(0, 1), part.targets.flatten()) + added


def _cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The cross entropy summed over tokens, computed in fp32 (fp64 for fp64 logits)."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)


# ---- the chunked loss ----------------------------------------------------------------------------


def apply_chunked_loss(model: nn.Module, chunks: int) -> None:
    """Make `model` compute its loss in chunks whenever it is called with labels.

    Raises SpecError if the model is not a transformers causal LM whose head follows its decoder.
    """
    apply_head_with_loss(_ChunkedLoss(model, chunks))


class _ChunkedLoss(HeadWithLoss):
    """A head that computes the loss one chunk of tokens at a time."""

    def __init__(self, model: nn.Module, chunks: int) -> None:
        super().__init__(model)
        self.chunks = chunks

    def summed(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        parameters = [p for p in self.head.parameters() if p.requires_grad]
        return chunked_cross_entropy(self.logits_of, hidden, targets, parameters, self.chunks)


def chunked_cross_entropy(
    logits: ChunkLogits,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    parameters: Sequence[nn.Parameter],
    chunks: int,
) -> torch.Tensor:
    """The cross entropy summed over all tokens; holds the logits of one chunk at a time.

    Args:
        logits: A function from a chunk's hidden states, (1, tokens, width), to its logits.
        hidden: The hidden states of all tokens, (…, width), contiguous.
        targets: The id that each token must predict, or IGNORED.
        parameters: The parameters of `logits` that need a gradient.
        chunks: The number of chunks; each has ⌈tokens / chunks⌉ tokens, the last one the rest.
    """
    rows = -(-targets.numel() // chunks)
    if torch.is_grad_enabled() and (hidden.requires_grad or parameters):
        total: torch.Tensor = _LossWithGradients.apply(logits, rows, targets, hidden, *parameters)  # type: ignore[no-untyped-call]
        return total
    with torch.no_grad():
        parts = _chunks(hidden, targets, rows)
        losses = [
            _cross_entropy(logits(part).flatten(0, 1), labels.flatten()) for part, labels in parts
        ]
        return torch.stack(losses).sum()


class _LossWithGradients(torch.autograd.Function):
    """The summed loss; gradients of hidden states and head are computed in the forward.

    They are divided by the number of tokens, as for a mean, so that they fit fp16; the backward
    multiplies them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: ChunkLogits,
        rows: int,
        targets: torch.Tensor,
        hidden: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        tokens, losses = targets.numel(), []
        hidden_gradient = torch.empty_like(hidden) if hidden.requires_grad else None
        head_gradients: list[torch.Tensor] = []
        parts = _chunks(hidden, targets, rows)
        for number, (part, labels) in enumerate(parts):
            leaf = part.detach().requires_grad_(hidden.requires_grad)
            wanted = [leaf, *parameters] if hidden.requires_grad else list(parameters)
            with torch.enable_grad():
                loss = _cross_entropy(logits(leaf).flatten(0, 1), labels.flatten())
                gradients = list(torch.autograd.grad(loss / tokens, wanted))
            losses.append(loss.detach())
            if hidden_gradient is not None:
                _split(hidden_gradient, rows)[number].copy_(gradients.pop(0))
            if head_gradients:
                _add_to(head_gradients, gradients)
            else:
                head_gradients = gradients
            # Free them before the next chunk allocates its gradients.
            del gradients
        ctx.tokens, ctx.gradients = tokens, (hidden_gradient, *head_gradients)
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the chunked loss has no gradients for a second backward pass; call the model "
                'again, or set loss = "plain"'
            )
        gradients, ctx.gradients = ctx.gradients, None
        scale = grad_output * ctx.tokens
        return None, None, None, *(g if g is None else g.mul_(scale) for g in gradients)


def _chunks(
    hidden: torch.Tensor, targets: torch.Tensor, rows: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of hidden states (1, rows, width) and targets (1, rows, 1), one per chunk."""
    return zip(_split(hidden, rows), _split(targets.reshape(-1, 1), rows), strict=True)


def _split(tensor: torch.Tensor, rows: int) -> tuple[torch.Tensor, ...]:
    """The tensor (…, width) as chunks (1, rows, width)."""
    tokens = tensor.view(1, -1, tensor.shape[-1])
    parts: tuple[torch.Tensor, ...] = tokens.split(rows, dim=1)  # type: ignore[no-untyped-call]
    return parts


def _add_to(totals: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """Add each gradient to its total, in place."""
    for total, gradient in zip(totals, gradients, strict=True):
        total.add_(gradient)
