"""The events of a reference model: a forward without gradients beside that of the trained model.

DPO compares the trained model with the model that it started from. That is a frozen copy, placed
like the trained one, or with LoRA the trained model without its adapters. Its forward follows the
forward of the trained model, whose activations are alive. Nothing is kept for a backward.

Where parameters are not resharded after the forward, the copy is never resharded: no backward
follows, so every device holds all of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwise.predict.program.blocks import UnitGroup, groups, identity, neighbour
from shardwise.predict.program.events import ROOT_UNIT, Alloc, Cost, Event, Instant, Repeat
from shardwise.predict.program.placement import Placement
from shardwise.predict.program.sizes import MicroBatch


def reference_forward(placed: Placement, m: MicroBatch) -> Iterator[Event]:
    """The events of the reference's forward on a micro-batch; none without a reference."""
    units = placed.units
    if units.reference is None:
        return
    # The trained model's own embedding and head are gathered until the end of its backward.
    owns_root = units.reference == "copy"
    if owns_root:
        yield from placed.lend(units.root, ROOT_UNIT)
        yield from placed.lent(units.root, ROOT_UNIT)
        yield Alloc("unsharded_parameters", placed.lent_bytes(units.root))
    yield from placed.exchanged(ROOT_UNIT, (units.lookup.forward, 1))
    if units.blocks:
        yield from placed.lend(units.blocks[0], 0)
    none = np.zeros(placed.rows, dtype=np.int64)
    for group in groups(units, none, lambda index: identity(neighbour(units, index + 1))):
        body = tuple(_block(placed, group))
        yield from body if group.times is None else (Repeat(body, group.times),)
    yield placed.compute("reference forward", ROOT_UNIT, Cost("forward", (units.root,)))
    yield from placed.exchanged_forward(units.root, ROOT_UNIT)
    yield _logits(placed)
    if owns_root:
        yield Alloc("unsharded_parameters", -placed.lent_bytes(units.root))


def _block(placed: Placement, group: UnitGroup) -> Iterator[Event]:
    """The events of one unit: gathered, the next one's gather issued, computed, and freed."""
    unit, index, s = group.unit, group.place, placed.s
    yield from placed.lent(unit, index)
    ahead = neighbour(placed.units, index + 1)
    if ahead is not None:
        yield from placed.lend(ahead, index + 1)
    held, boundary = placed.lent_bytes(unit), s.boundary
    copying = Alloc("unsharded_parameters", held + placed.lent_buffer(unit))
    yield Instant((copying, Alloc("activations", boundary)))
    for block in unit.blocks:
        for moment in block.stage.forward_unsaved or block.stage.forward:
            working = Alloc("activations", moment.activation_bytes * s.tokens + boundary)
            used = Alloc("unsharded_parameters", held + placed.cast_bytes(block))
            yield Instant((working, used, *placed.dequantised(block, moment)))
    yield placed.compute("reference forward", index, Cost("forward", (unit,)))
    yield from placed.exchanged_forward(unit, index)


def _logits(placed: Placement) -> Instant:
    """The moment at which the logits of both models are alive, or those of one chunk."""
    s = placed.s
    peak = placed.units.root.stage.forward_peak.logit_bytes
    size = np.where(placed.chunked, peak * s.chunk_tokens, 2.0 * peak * s.tokens)
    return Instant((Alloc("logits", size), Alloc("activations", s.boundary)))
