"""The loss of a micro-batch: plain, or computed in chunks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from shardwise.stacks.program.divide import Exchange, positions_of
from shardwise.stacks.program.settings import (
    AUTOCAST,
    CHUNKED_LOSS,
    CONTEXT,
    DEVICE,
    DIVIDED,
    LOSS_CHUNKS,
    MODEL,
    PARAM_DTYPE,
    TENSOR,
    UPCASTS,
)


class ChunkedLoss(torch.autograd.Function):
    """Cross entropy, summed over tokens, with the logits of one chunk of tokens at a time.

    Gradients are computed in the forward pass, as those of a mean; the backward pass scales them.
    """

    @staticmethod
    def forward(
        ctx: Any,
        head: Callable[[torch.Tensor], torch.Tensor],
        x: torch.Tensor,
        targets: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        tokens, losses = targets.numel(), []
        sums: tuple[torch.Tensor, ...] = ()
        rows = -(-tokens // LOSS_CHUNKS)
        x_gradient = torch.empty_like(x)
        chunks, places = (
            tensor.view(1, -1, x.shape[-1]).split(rows, dim=1) for tensor in (x, x_gradient)
        )
        for chunk, place, labels in zip(chunks, places, targets.flatten().split(rows), strict=True):
            part = chunk.detach().requires_grad_()
            with torch.enable_grad():
                logits = head(part).float() if UPCASTS else head(part)
                loss = cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
                gradients = torch.autograd.grad(loss / tokens, (part, *parameters))
            losses.append(loss.detach())
            place.copy_(gradients[0])
            if sums:
                for total, gradient in zip(sums, gradients[1:], strict=True):
                    total.add_(gradient)
            else:
                sums = gradients[1:]
            del gradients
        ctx.tokens, ctx.gradients = tokens, (x_gradient, *sums)
        return torch.stack(losses).sum()

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        scale = grad_output * ctx.tokens
        x_gradient, *sums = (gradient.mul_(scale) for gradient in gradients)
        return None, x_gradient, None, *sums


def compute_loss_in_chunks(model: Any) -> None:
    """Let `model(ids, targets)` return the loss, summed over tokens."""
    forward, decoder, head = model.forward, model.get_decoder(), model.get_output_embeddings()
    # Parameters of anything else would get no gradient.
    assert {*model.parameters()} <= {*decoder.parameters(), *head.parameters()}

    def loss_in_chunks(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        outputs = decoder(input_ids=ids)
        hidden, kind = outputs.last_hidden_state, type(outputs)

        def logits(part: torch.Tensor) -> torch.Tensor:
            # All that the model does after its decoder: the head, caps and scales of logits.
            decoder.forward = lambda *_, **__: kind(last_hidden_state=part)
            try:
                return forward(input_ids=ids).logits
            finally:
                del decoder.forward

        return ChunkedLoss.apply(logits, hidden, targets, *head.parameters())

    model.forward = loss_in_chunks


def loss_sum(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """The loss of a micro-batch, summed over the tokens that a rank computes."""
    inputs, targets = ids[:, :-1], ids[:, 1:]
    if CONTEXT > 1:
        # One part of every sequence.
        part = dist.get_rank(Exchange.group)
        inputs, targets = (x.chunk(CONTEXT, dim=1)[part] for x in (inputs, targets))
    with torch.autocast(DEVICE, dtype=PARAM_DTYPE) if AUTOCAST else nullcontext():
        if MODEL == "written" or CHUNKED_LOSS:
            return model(inputs, targets)
        if DIVIDED:
            positions = positions_of(inputs)[None]
            logits = model(input_ids=inputs, position_ids=positions).logits
        elif MODEL == "transformers":
            logits = model(input_ids=inputs).logits
        else:
            logits = model(inputs)
            logits = getattr(logits, "logits", logits)
        if UPCASTS:
            logits = logits.float()
        loss: Any = cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        if TENSOR > 1:
            # Every rank of a tensor group has it.
            loss = loss.full_tensor()
        return loss
