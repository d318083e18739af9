"""What a placement of parameters adds to a step: base of sharded (fsdp) and replicated (ddp)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from shardwise.predict.configurations import Bools, Floats
from shardwise.predict.program.blocks import Group
from shardwise.predict.program.events import Alloc, Event, Instant, Message, Run, Wait, Work
from shardwise.predict.program.prices import NoPrices
from shardwise.predict.program.sizes import MicroBatch, Sizes


class Placement:
    """Emits what happens around head, loss and blocks, for rows that share a shape."""

    # Streams whose collectives slow a block's backward.
    beside: tuple[str, ...] = ("shard", "replicate")

    def __init__(self, sizes: Sizes, prices: NoPrices) -> None:
        self.s, self.p, self.c, self.units = sizes, prices, sizes.c, sizes.units
        self.rows = len(sizes.c)
        self.every: Bools = np.ones(self.rows, dtype=np.bool_)

    # ---- what each placement says of its own ------------------------------------------------

    def begin(self, m: MicroBatch) -> Iterator[Event]:
        """Before the first block."""
        raise NotImplementedError

    def block_forward(self, m: MicroBatch, group: Group) -> Iterator[Event]:
        raise NotImplementedError

    def head_begins(self, m: MicroBatch) -> Iterator[Event]:
        """After the last block."""
        raise NotImplementedError

    def model_returned(self, m: MicroBatch) -> Iterator[Event]:
        """After the head: the loss lies outside the model."""
        raise NotImplementedError

    def backward_begins(self, m: MicroBatch) -> Iterator[Event]:
        raise NotImplementedError

    def head_gradients(self, m: MicroBatch, made: float) -> tuple[Alloc, ...]:
        """What the head's backward has made, when it has made `made` elements."""
        raise NotImplementedError

    def head_done(self, m: MicroBatch) -> Iterator[Event]:
        raise NotImplementedError

    def block_backward(self, m: MicroBatch, group: Group) -> Iterator[Event]:
        raise NotImplementedError

    def last_backward(self, m: MicroBatch) -> Iterator[Event]:
        """The embedding's gradient, and what is left to reduce."""
        raise NotImplementedError

    def forward_neighbours(self, index: int) -> tuple[int, ...]:
        """What else decides a unit's events in the forward, as a key."""
        return ()

    def backward_neighbours(self, index: int) -> tuple[int, ...]:
        return ()

    # ---- in common --------------------------------------------------------------------------

    def resting(self) -> Iterator[Event]:
        """What is alive at all times."""
        here = ~self.c.offload
        yield Alloc("parameters", self.s.parameter_bytes * here)
        yield Alloc("optimizer", self.s.gradient_bytes * self.s.states * here)
        yield Alloc("other", self.s.batch)

    def gradients_dropped(self) -> Iterator[Event]:
        yield Alloc("gradients", -self.s.gradient_bytes * ~self.c.offload)

    def compute(
        self, name: str, unit: int, seconds: Floats, beside: tuple[str, ...] = ("shard",)
    ) -> Run:
        return Run("compute", "compute", name, unit, seconds, beside=beside)

    def copy(self, name: str, unit: int, seconds: Floats, **how: object) -> Run:
        return Run("compute", "copy", name, unit, seconds, **how)  # type: ignore[arg-type]

    def collective(
        self,
        stream: str,
        work: Work,
        unit: int,
        seconds: Floats,
        message: Message | None,
        **how: object,
    ) -> Iterator[Event]:
        yield Run(stream, work, work, unit, seconds, message=message, **how)  # type: ignore[arg-type]
        if self.p.waits:
            yield Wait("compute", (stream,))

    def forward_of_blocks(self, group: Group, copies: bool = False) -> Iterator[Event]:
        """Blocks at work, one after the other; each leaves what its backward will read."""
        for number, block in enumerate(group.unit.blocks):
            again = group.recomputed > number
            if copies:
                yield Alloc("unsharded_parameters", self.copied(float(block.numel)))
            yield Instant((Alloc("activations", self.s.forward_working(block.stage, again)),))
            yield Alloc("activations", self.s.kept(block.stage, again))
        yield self.compute("forward", group.place, self.p.forward(group.unit))

    def copied(self, elements: float) -> Floats:
        """Bytes of autocast's copies of a block's weights."""
        raise NotImplementedError


def only(rows: Bools) -> Bools | None:
    """A mask for `Run.only`: None where it is all rows."""
    return None if rows.all() else rows
