"""The events of head and loss: the end of a micro-batch's forward, the start of its backward."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwise.predict.program.events import ROOT, Alloc, Event, Instant
from shardwise.predict.program.placement import Placement
from shardwise.predict.program.sizes import MicroBatch

# The loss is computed in fp32 at least.
LOSS_BYTES = 4


def head_forward(placed: Placement, m: MicroBatch) -> Iterator[Event]:
    """While the head runs there is no more of the logits than the head itself makes."""
    s, c = placed.s, placed.c
    peak = s.units.root.stage.forward_peak
    made = c.param_bytes / (np.maximum(c.param_bytes, LOSS_BYTES) + LOSS_BYTES)
    working = Alloc("activations", peak.activation_bytes * s.tokens)
    logits = peak.logit_bytes * s.tokens
    yield from placed.head_begins(m)
    yield placed.compute("forward", ROOT, placed.p.forward(s.units.root))
    yield Instant((working, Alloc("logits", logits * made)))
    yield from placed.model_returned(m)
    yield Instant((working, Alloc("logits", logits)))


def head_backward(placed: Placement, m: MicroBatch) -> Iterator[Event]:
    s = placed.s
    yield from placed.backward_begins(m)
    yield placed.compute("backward", ROOT, placed.p.root_backward())
    for moment in s.units.root.stage.backward:
        yield Instant(
            (
                Alloc("activations", moment.activation_bytes * s.tokens),
                Alloc("logits", moment.logit_bytes * s.tokens),
                *placed.head_gradients(m, moment.gradient_elements),
            )
        )
    yield from placed.head_done(m)
