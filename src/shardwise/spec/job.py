"""The job: sequence length, global batch and optimizer, independent of the strategy."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, StrictBool, model_validator

from shardwise.spec.optimizer import Optimizer
from shardwise.spec.quantity import Bytes, Count
from shardwise.spec.record import Record, SpecError
from shardwise.spec.strategy import Strategy

# What is trained besides language modelling: on pairs of answers, or on answers it generates.
Method = Literal["dpo", "grpo"]


class Job(Record):
    """Sequence length, batch in tokens over the whole cluster, optimizer and training method."""

    seq_len: Annotated[Count, Field(ge=1, le=10**9)]
    global_batch: Annotated[Count, Field(ge=1, le=10**13)] | None = None
    optimizer: Optimizer = "adamw"
    # Default: a language model, in pre-training or supervised fine-tuning.
    method: Method | None = None
    # Whether a frozen reference model runs beside it. Default: for dpo yes, for grpo no.
    reference: StrictBool | None = None
    # With expert parallelism: tokens of the device that gets the most, over the mean. 1 is even.
    routing: Annotated[float, Field(ge=1, le=1024)] = 1.0
    # Memory of each device that is set aside for generating answers, such as "24GiB".
    generation_memory: Bytes | None = None

    @model_validator(mode="after")
    def _check_method(self) -> Self:
        if self.reference is not None and self.method is None:
            raise ValueError('reference means nothing without method = "dpo" or "grpo"')
        if self.generation_memory is not None and self.method != "grpo":
            raise ValueError('generation_memory means nothing without method = "grpo"')
        if self.method == "grpo" and self.generation_memory is None:
            raise ValueError(
                "grpo generates answers, and what that needs is not predicted: set "
                'generation_memory to what it takes on each device, such as "24GiB", or to 0 where '
                "other devices generate"
            )
        return self

    @property
    def has_reference(self) -> bool:
        """Whether a reference model runs beside the trained one."""
        return self.method == "dpo" if self.reference is None else self.reference

    @property
    def example(self) -> int:
        """Sequences of one example, which a micro-batch cannot divide: a pair for dpo."""
        return 2 if self.method == "dpo" else 1

    def split(self, strategy: Strategy) -> Strategy:
        """`strategy` with the accumulation whose step comes closest to the global batch.

        Unchanged without a global batch. Raises SpecError if a micro-batch is too large.
        """
        if strategy.micro_batch % self.example:
            raise SpecError(
                f"strategy.micro_batch: {strategy.micro_batch} sequences are no pairs; dpo trains "
                "a chosen and a rejected sequence together: set an even number"
            )
        if self.global_batch is None:
            return strategy
        if strategy.shares is not None:
            return self._with_shares(strategy)
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

    def _with_shares(self, strategy: Strategy) -> Strategy:
        """`strategy` as it is; SpecError if its shares are not the global batch."""
        tokens = self.tokens_per_step(strategy)
        if tokens != self.global_batch:
            raise SpecError(
                f"job.global_batch: {self.global_batch:,} tokens, but strategy.shares make steps "
                f"of {tokens:,}; set it to that, or leave it out"
            )
        return strategy

    @property
    def sequences(self) -> float:
        """Sequences in the global batch, not rounded; 0 without a global batch."""
        return (self.global_batch or 0) / self.seq_len

    def tokens_per_step(self, strategy: Strategy) -> int:
        """Tokens of one optimizer step over all devices."""
        return self.seq_len * strategy.micro_batch * strategy.micro_batches
