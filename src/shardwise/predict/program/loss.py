"""The events of head and loss: the end of a micro-batch's forward, the start of its backward.

A plain loss is computed outside the model, from the logits of all tokens. A chunked loss is
computed inside the model's forward, together with the head and the backward of both, one chunk of
tokens at a time. What remains are the gradients of the head's input and of its weights. Liger's
fused loss does the same with chunks of its own; Cut Cross-Entropy has the order of a plain loss and
no logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwise.predict.configurations import Floats
from shardwise.predict.program.events import (
    ROOT_UNIT,
    Alloc,
    Cost,
    Event,
    Instant,
    Repeat,
    only_in_rows,
)
from shardwise.predict.program.fused_loss import CUT_BACKWARD, CUT_FORWARD, LIGER_TOKEN_BYTES
from shardwise.predict.program.placement import Placement
from shardwise.predict.program.sizes import MicroBatch
from shardwise.units.stage import Moment

# The loss is computed in fp32 at least.
LOSS_BYTES = 4


def loss_forward(placed: Placement, m: MicroBatch) -> Iterator[Event]:
    """The events of head and loss in the forward; for a chunked loss, also their backward."""
    s = placed.s
    yield from placed.head_begins(m)
    yield from only_in_rows(~placed.loss_inside, _plain_forward(placed))
    if placed.chunked.any():
        chunk = tuple(_chunk_passes(placed))
        # The first chunk allocates the gradient of the head's weights, the others add to it.
        yield from only_in_rows(placed.chunked, (*chunk, _summed_gradient(placed, s.head_elements)))
        yield Repeat(chunk, (s.chunks - 1) * placed.chunked)
    yield from only_in_rows(placed.c.liger, _liger(placed))
    yield from placed.model_returned(m)
    yield from only_in_rows(~placed.loss_inside, (_logits(placed),))


def loss_backward(placed: Placement, m: MicroBatch) -> Iterator[Event]:
    """The events from the start of the backward to the end of the head's backward."""
    s = placed.s
    yield from placed.backward_begins(m)
    yield from only_in_rows(~placed.loss_inside, _plain_backward(placed, m))
    end = s.head_moments[-1].activation_bytes * s.tokens + s.boundary
    handed_on = Instant((Alloc("activations", end),))
    yield from only_in_rows(
        placed.loss_inside, (handed_on, _summed_gradient(placed, -s.head_elements))
    )
    yield from placed.head_done(m)


def _plain_forward(placed: Placement) -> Iterator[Event]:
    """The head's forward with a plain loss, on all tokens at once.

    While the head runs, only the logits it returns are alive, not the copies of the loss.
    """
    c = placed.c
    made = c.param_bytes / (np.maximum(c.param_bytes, LOSS_BYTES) + LOSS_BYTES)
    yield placed.compute("forward", ROOT_UNIT, Cost("forward", (placed.units.root,)))
    yield from placed.exchanged_forward(placed.units.root, ROOT_UNIT)
    yield _logits(placed, made)


def _logits(placed: Placement, share: float | Floats = 1.0) -> Instant:
    """The moment at which `share` of the forward's peak of logits is alive."""
    peak, tokens = placed.units.root.stage.forward_peak, placed.s.tokens
    working = Alloc("activations", peak.activation_bytes * tokens)
    return Instant((working, _logits_or_cut(placed, peak.logit_bytes * share, CUT_FORWARD)))


def _logits_or_cut(
    placed: Placement, bytes_per_token: float | Floats, cut: tuple[float, float]
) -> Alloc:
    """The logits of all tokens; with Cut Cross-Entropy, what it keeps instead."""
    whole = bytes_per_token * placed.s.tokens
    return Alloc("logits", np.where(placed.c.cut, placed.fused.cut_bytes(cut), whole))


def _plain_backward(placed: Placement, m: MicroBatch) -> Iterator[Event]:
    """The backward of head and loss with a plain loss."""
    s = placed.s
    yield placed.compute("backward", ROOT_UNIT, Cost("root_backward"))
    yield from placed.exchanged(ROOT_UNIT, (placed.units.root.stage.exchanges.backward, 1))
    for moment in s.head_moments:
        yield Instant(
            (
                Alloc("activations", moment.activation_bytes * s.tokens),
                _logits_or_cut(placed, moment.logit_bytes, CUT_BACKWARD),
                *placed.head_gradients(m, moment.gradient_elements),
            )
        )


def _chunk_passes(placed: Placement) -> Iterator[Event]:
    """Forward and backward of head and loss on one chunk of tokens."""
    s = placed.s
    for moment in (s.units.root.stage.forward_peak, *s.head_moments):
        made = Alloc("unsharded_gradients", moment.gradient_elements * placed.chunk_gradient_bytes)
        yield Instant(
            (
                _chunk_activations(placed, moment),
                Alloc("logits", _chunk_bytes(placed, moment.logit_bytes)),
                made,
            )
        )
    yield placed.compute("loss", ROOT_UNIT, Cost("chunk"))


def _liger(placed: Placement) -> Iterator[Event]:
    """Forward and backward of head and loss in Liger's kernel, chunk by chunk."""
    s, fused = placed.s, placed.fused
    yield _summed_gradient(placed, s.head_elements)
    kept = s.units.root.stage.kept["none"].activation_bytes + LIGER_TOKEN_BYTES
    working = Alloc("activations", kept * s.tokens + s.boundary)
    # The logits of a chunk are freed when those of the next one have been computed.
    both = Alloc("logits", fused.chunk_logits * np.minimum(fused.chunks, 2.0))
    yield Instant((working, both))
    product = Alloc("unsharded_gradients", fused.product_bytes)
    yield Instant((working, Alloc("logits", fused.chunk_logits), product))
    yield placed.compute("loss", ROOT_UNIT, Cost("liger"))


def _summed_gradient(placed: Placement, elements: float) -> Alloc:
    """Allocation of the head's gradient, summed over chunks; negative `elements` free it."""
    return Alloc("unsharded_gradients", elements * placed.head_gradient_bytes)


def _chunk_activations(placed: Placement, moment: Moment) -> Alloc:
    """Activations alive during a chunk.

    The final norm's saved tensors and the head's input, a gradient of the same size, and what the
    chunk itself adds.
    """
    s = placed.s
    kept = s.units.root.stage.kept["none"].activation_bytes
    added = max(0.0, moment.activation_bytes - kept)
    return Alloc("activations", kept * s.tokens + s.boundary + _chunk_bytes(placed, added))


def _chunk_bytes(placed: Placement, bytes_per_token: float) -> Floats:
    """Bytes of the largest chunk of tokens."""
    return bytes_per_token * placed.s.chunk_tokens
