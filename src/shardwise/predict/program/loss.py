"""The events of head and loss: the end of a micro-batch's forward, the start of its backward.

Plain, the head makes logits of all tokens, and the loss lies outside the model. Chunked, both run
inside the model's forward on one chunk of the tokens after the other, and so does their backward:
what is left of it is a gradient of the head's input and one of its weights.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwise.predict.configurations import Floats
from shardwise.predict.program.events import ROOT, Alloc, Cost, Event, Instant, Repeat
from shardwise.predict.program.placement import Placement
from shardwise.predict.program.sizes import MicroBatch
from shardwise.units.unit import Moment

# The loss is computed in fp32 at least.
LOSS_BYTES = 4


def loss_forward(placed: Placement, m: MicroBatch) -> Iterator[Event]:
    yield from placed.head_begins(m)
    yield from _chunks(placed, m) if placed.chunked else _all_tokens(placed, m)


def loss_backward(placed: Placement, m: MicroBatch) -> Iterator[Event]:
    s = placed.s
    yield from placed.backward_begins(m)
    if placed.chunked:
        end = s.head_moments[-1]
        yield Instant((Alloc("activations", end.activation_bytes * s.tokens + s.boundary),))
        yield _summed(placed, -s.head_elements)
    else:
        yield placed.compute("backward", ROOT, Cost("root_backward"))
        for moment in s.head_moments:
            yield Instant(
                (
                    Alloc("activations", moment.activation_bytes * s.tokens),
                    Alloc("logits", moment.logit_bytes * s.tokens),
                    *placed.head_gradients(m, moment.gradient_elements),
                )
            )
    yield from placed.head_done(m)


def _all_tokens(placed: Placement, m: MicroBatch) -> Iterator[Event]:
    """While the head runs there is no more of the logits than the head itself makes."""
    s, c = placed.s, placed.c
    peak = s.units.root.stage.forward_peak
    made = c.param_bytes / (np.maximum(c.param_bytes, LOSS_BYTES) + LOSS_BYTES)
    working = Alloc("activations", peak.activation_bytes * s.tokens)
    logits = peak.logit_bytes * s.tokens
    yield placed.compute("forward", ROOT, Cost("forward", (s.units.root,)))
    yield Instant((working, Alloc("logits", logits * made)))
    yield from placed.model_returned(m)
    yield Instant((working, Alloc("logits", logits)))


def _chunks(placed: Placement, m: MicroBatch) -> Iterator[Event]:
    """The first chunk makes the gradient of the head's weights, all others add to it."""
    s = placed.s
    body = tuple(_chunk(placed))
    yield from body
    yield _summed(placed, s.head_elements)
    yield Repeat(body, s.chunks - 1)
    yield from placed.model_returned(m)


def _chunk(placed: Placement) -> Iterator[Event]:
    s = placed.s
    for moment in (s.units.root.stage.forward_peak, *s.head_moments):
        made = Alloc("unsharded_gradients", moment.gradient_elements * placed.chunk_gradient_bytes)
        yield Instant(
            (_kept(placed, moment), Alloc("logits", _of_chunk(placed, moment.logit_bytes)), made)
        )
    yield placed.compute("loss", ROOT, Cost("chunk"))


def _summed(placed: Placement, elements: float) -> Alloc:
    """The head's gradient, summed over chunks."""
    return Alloc("unsharded_gradients", elements * placed.head_gradient_bytes)


def _kept(placed: Placement, moment: Moment) -> Alloc:
    """What the final norm keeps and the head's input, with a gradient as large as that; and what
    the chunk adds.
    """
    s = placed.s
    kept = s.units.root.stage.kept["none"].activation_bytes
    added = max(0.0, moment.activation_bytes - kept)
    return Alloc("activations", kept * s.tokens + s.boundary + _of_chunk(placed, added))


def _of_chunk(placed: Placement, bytes_per_token: float) -> Floats:
    return bytes_per_token * placed.s.chunk_tokens
