"""Reasons for settings: recompute, the loss, and the batch."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.planning.reasons.reason import Reason, share_words
from shardwise.spec.fused_loss import PACKAGES
from shardwise.spec.quantity import show_count
from shardwise.spec.strategy import LossKernel, Strategy
from shardwise.step.memory_words import shortfall_words, show_memory
from shardwise.step.words import signed_percent

# ---- memory ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NoRecompute(Reason):
    """Activations fit without recomputation."""

    kind = "no recompute"

    def words(self, blocks: int | None = None) -> str:
        return "No recompute: all activations fit."


SAVES_COPIES = "Recompute: only inputs of blocks are copied to the host, which takes less time."


@dataclass(frozen=True, kw_only=True)
class Recomputes(Reason):
    """Memory needed without recompute, and the share of the step that recompute takes."""

    kind = "recomputes"

    strategy: Strategy
    needed_bytes: float
    needed_without_bytes: float
    usable_bytes: int
    share_of_step: float

    def words(self, blocks: int | None = None) -> str:
        if self._saves_copies:
            return SAVES_COPIES
        cost = f"recompute takes {share_words(self.share_of_step)} of the step"
        if self.needed_without_bytes > self.usable_bytes:
            return f"Without recompute it {self._shortfall()}; {cost}."
        saved = self.needed_without_bytes - self.needed_bytes
        return f"Recompute saves {show_memory(saved)}; {cost}."

    def brief(self, blocks: int | None = None) -> str:
        if self._saves_copies:
            return SAVES_COPIES
        cost = f"it takes {share_words(self.share_of_step)} of the step"
        return f"Without recompute: {self._shortfall()}; {cost}."

    @property
    def _saves_copies(self) -> bool:
        """Whether offload makes room enough, so that recompute only saves copies to the host."""
        fits = self.needed_without_bytes <= self.usable_bytes
        return fits and self.strategy.offloads("activations")

    def _shortfall(self) -> str:
        return shortfall_words(self.needed_without_bytes, self.usable_bytes)


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss(Reason):
    """Memory needed with a chunked loss, and with the logits of all tokens at once."""

    kind = "chunked loss"

    chunks: int
    needed_bytes: float
    needed_plain_bytes: float
    usable_bytes: int

    def words(self, blocks: int | None = None) -> str:
        start = f"Loss in {self.chunks} chunks: with all logits at once it would need "
        plain = show_memory(self.needed_plain_bytes)
        if self.needed_plain_bytes > self.usable_bytes:
            return f"{start}{plain}, {show_memory(self.usable_bytes)} are usable."
        return f"{start}{plain} instead of {show_memory(self.needed_bytes)}."


@dataclass(frozen=True, kw_only=True)
class FusedLoss(Reason):
    """Memory needed with a fused loss, and with the logits of all tokens at once."""

    kind = "fused loss"

    kernel: LossKernel
    needed_bytes: float
    needed_plain_bytes: float
    usable_bytes: int

    def words(self, blocks: int | None = None) -> str:
        package = PACKAGES[self.kernel][0]
        start = f"Fused loss (needs {package}): with all logits at once it would need "
        plain = show_memory(self.needed_plain_bytes)
        if self.needed_plain_bytes > self.usable_bytes:
            return f"{start}{plain}, {show_memory(self.usable_bytes)} are usable."
        return f"{start}{plain} instead of {show_memory(self.needed_bytes)}."


@dataclass(frozen=True, kw_only=True)
class RootSplit(Reason):
    """Memory saved by embedding and head as separate units."""

    kind = "root split"

    saved_bytes: float

    def words(self, blocks: int | None = None) -> str:
        return f"Embedding and head are units of their own: {show_memory(self.saved_bytes)} less."


# ---- the batch ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepBatch(Reason):
    """Tokens per step = data parallel x micro-batch x accumulation x sequence length."""

    kind = "step batch"

    tokens: int
    data_parallel: int
    micro_batch: int
    accumulate: int
    seq_len: int
    # Devices that work on the same sequences.
    inner: int = 1
    # None where no global batch was given.
    asked: int | None = None

    @property
    def deviation(self) -> float:
        """Relative deviation from the requested global batch; 0 without one."""
        return self.tokens / self.asked - 1 if self.asked else 0.0

    def words(self, blocks: int | None = None) -> str:
        if self.asked and self.tokens != self.asked:
            return (
                f"Global batch {self.tokens:,} tokens instead of {self.asked:,} "
                f"({signed_percent(self.deviation, 1)}): divides evenly ({self._product()})."
            )
        return f"Tokens per step: {self.tokens:,} ({self._product()})."

    def brief(self, blocks: int | None = None) -> str:
        """Without the factors, which the configuration already shows."""
        if self.asked and self.tokens != self.asked:
            return self.words(blocks)
        devices = self.data_parallel * self.inner
        over = f" over {devices:,} devices" if devices > 1 else ""
        return f"Batch: {self.tokens:,} tokens per step{over}."

    def _product(self) -> str:
        """The factors of the tokens per step, as text."""
        plural = "s" if self.data_parallel > 1 else ""
        ranks = f"{self.data_parallel:,} device{plural}"
        if self.inner > 1:
            ranks = f"{self.data_parallel:,} group{plural} of {self.inner} devices"
        factors = [
            ranks,
            f"micro-batch {self.micro_batch:,}",
            f"{self.accumulate:,} accumulation steps" if self.accumulate > 1 else "",
            f"{self.seq_len:,} tokens",
        ]
        return " × ".join(factor for factor in factors if factor)


@dataclass(frozen=True, kw_only=True)
class MicroBatchGain(Reason):
    """The relative gain of the micro-batch over a smaller one."""

    kind = "micro batch gain"

    micro_batch: int
    smaller: int
    gain: float

    def words(self, blocks: int | None = None) -> str:
        gain = share_words(self.gain)
        return f"Micro-batch {self.micro_batch} is {gain} faster than {self.smaller}."


@dataclass(frozen=True, kw_only=True)
class BatchCapped(Reason):
    """Without a global batch, micro-batches larger than in most published runs were not tried.

    The limits are tokens per step, and tokens per micro-batch of one device.
    """

    kind = "batch capped"

    limit_tokens: int
    micro_batch_tokens: int

    def words(self, blocks: int | None = None) -> str:
        return (
            "Larger micro-batches were not tried: most published runs have at most "
            f"{show_count(self.limit_tokens)} tokens per step and "
            f"{show_count(self.micro_batch_tokens)} per micro-batch. Set --global-batch to choose "
            "the batch."
        )


@dataclass(frozen=True, kw_only=True)
class LargeBatch(Reason):
    """A step has more tokens than published runs usually have."""

    kind = "large batch"

    tokens: int
    limit_tokens: int

    def words(self, blocks: int | None = None) -> str:
        return (
            f"Warning: {show_count(self.tokens)} tokens per step are more than published runs "
            f"usually have (up to {show_count(self.limit_tokens)}). Batches this large may need "
            "more tokens to reach the same loss."
        )


@dataclass(frozen=True, kw_only=True)
class DataParallelEnds(Reason):
    """Every device or group has one sequence per step, so data parallelism cannot grow further."""

    kind = "data parallel ends"

    devices: int
    tokens: int
    # Devices that work on the same sequences.
    inner: int = 1

    def words(self, blocks: int | None = None) -> str:
        each, more = ("each group", "more ") if self.inner > 1 else ("each", "")
        return (
            f"Data parallelism ends at {self.devices:,} devices for this batch: {each} has one "
            f"sequence per step. More devices need a larger batch, shorter sequences, or {more}"
            "tensor or context parallelism."
        )
