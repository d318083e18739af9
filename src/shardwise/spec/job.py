"""The job: sequence length, global batch and optimizer, independent of the strategy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from shardwise.spec.optimizer import Optimizer
from shardwise.spec.quantity import Count
from shardwise.spec.record import Record, SpecError
from shardwise.spec.strategy import Strategy


class Job(Record):
    """Sequence length, batch in tokens over the whole cluster, and optimizer."""

    seq_len: Annotated[Count, Field(ge=1, le=10**9)]
    global_batch: Annotated[Count, Field(ge=1, le=10**13)] | None = None
    optimizer: Optimizer = "adamw"

    def split(self, strategy: Strategy) -> Strategy:
        """`strategy` with the accumulation whose step comes closest to the global batch.

        Unchanged without a global batch. Raises SpecError if a micro-batch is too large.
        """
        if self.global_batch is None:
            return strategy
        per_micro_batch = self.seq_len * strategy.micro_batch * strategy.data_parallel
        accumulate = int(self.global_batch / per_micro_batch + 0.5)
        if accumulate < 1 and strategy.micro_batch == 1:
            most = self.global_batch // self.seq_len
            raise SpecError(
                f"job.global_batch: {self.global_batch:,} tokens are less than half of one "
                f"micro-batch everywhere ({per_micro_batch:,} tokens); at one sequence each, at "
                f"most {most:,} devices can work on different ones: beyond that, let more of them "
                'share sequences by tensor or context parallelism (--strategy "zero3 tp8")'
            )
        if accumulate < 1:
            raise SpecError(
                f"job.global_batch: {self.global_batch:,} tokens are less than half of one "
                f"micro-batch on every device ({per_micro_batch:,} tokens); raise it, or lower "
                "micro_batch, seq_len or the number of devices"
            )
        return strategy.but(accumulate=accumulate)

    @property
    def sequences(self) -> float:
        """Sequences in the global batch, not rounded; 0 without a global batch."""
        return (self.global_batch or 0) / self.seq_len

    def tokens_per_step(self, strategy: Strategy) -> int:
        """Tokens of one optimizer step over all devices."""
        return self.seq_len * strategy.micro_batch * strategy.accumulate * strategy.data_parallel
