"""Warnings of a plan, and the reasons of the objectives sequence and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.planning.reasons.reason import Reason
from shardwise.predict.fit import Parallelism
from shardwise.predict.intervals import Evidence
from shardwise.spec.optimizer import Optimizer
from shardwise.spec.quantity import show_count
from shardwise.spec.strategy import Strategy
from shardwise.step.memory_words import show_memory
from shardwise.step.words import capital, parallelism_words, percent

# ---- warnings -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StackLeavesOut(Reason):
    """Parallelism that a stack has and the search does not try.

    If the best configuration without it waits for most of its step, nothing is recommended.
    """

    kind = "stack leaves out"

    parallelism: tuple[Parallelism, ...]
    recommended: bool
    # Figures of the best configuration without this parallelism.
    waiting_share: float
    mfu: float | None
    strategy: Strategy | None

    def words(self, blocks: int | None = None) -> str:
        names = capital(parallelism_words(self.parallelism))
        are = "are" if len(self.parallelism) > 1 else "is"
        searched = f"{names} of this stack {are} not searched"
        if self.recommended:
            return f"{searched}: a plan with it may be faster."
        return (
            f"{searched}, and without it a step waits {percent(self.waiting_share)} of its time "
            f"(MFU {percent(self.mfu or 0.0)}): no recommendation. Use the stack's own recipe."
        )


@dataclass(frozen=True, kw_only=True)
class BeyondPositions(Reason):
    """The sequence is longer than the model's number of positions."""

    kind = "beyond positions"

    seq_len: int
    positions: int

    def words(self, blocks: int | None = None) -> str:
        return (
            f"Sequence length {self.seq_len:,} is longer than the model's {self.positions:,} "
            "positions."
        )


@dataclass(frozen=True, kw_only=True)
class DecimalLength(Reason):
    """The sequence length is a multiple of 1,000; a multiple of 1,024 may have been meant."""

    kind = "decimal length"

    seq_len: int
    binary: int

    def words(self, blocks: int | None = None) -> str:
        thousands = self.seq_len // 1000
        return (
            f"Sequence length {self.seq_len:,}: {thousands}k means {self.seq_len:,}, "
            f"{thousands}Ki means {self.binary:,}."
        )


@dataclass(frozen=True, kw_only=True)
class FewerDevices(Reason):
    """The requested batch does not divide over all devices, so the plan uses only `devices`."""

    kind = "fewer devices"

    devices: int
    of_devices: int
    asked: int
    # The closest batches that divide over all devices, in tokens.
    neighbours: tuple[int, ...]

    def words(self, blocks: int | None = None) -> str:
        near = " or ".join(f"{tokens:,}" for tokens in self.neighbours)
        return (
            f"The global batch of {self.asked:,} tokens does not divide over {self.of_devices:,} "
            f"devices: planned for {self.devices:,} of them. To use all, set --global-batch to "
            f"{near}."
        )


@dataclass(frozen=True, kw_only=True)
class OnlyReplicated(Reason):
    """The trainer does not shard the parameters of this optimizer: no sharded layout is tried."""

    kind = "only replicated"

    optimizer: Optimizer
    # An optimizer with small states that can be sharded.
    instead: Optimizer

    def words(self, blocks: int | None = None) -> str:
        return (
            f"{self.optimizer} updates whole matrices: the trainer runs it on one device or with "
            f"DDP, and no sharded layout is searched. {self.instead} can be sharded, and has small "
            "states too."
        )


@dataclass(frozen=True, kw_only=True)
class UnfittedDevice(Reason):
    """Few or no runs on this device were fitted; its times follow from measured kernels.

    With the evidence "relative", these are kernels of a similar device.
    """

    kind = "unfitted device"

    device: str
    evidence: Evidence

    def words(self, blocks: int | None = None) -> str:
        if self.evidence == "kernels":
            return (
                f"Few runs on {self.device} were fitted, or none: times follow from its measured "
                "kernels."
            )
        return f"No run on {self.device} was fitted; on such devices runs took up to 50% longer."


@dataclass(frozen=True, kw_only=True)
class UnfittedExperts(Reason):
    """How many runs of mixtures were predicted; routing is assumed to be even, or as stated."""

    kind = "unfitted experts"

    experts: int
    # Published runs whose predicted times were compared with measured ones.
    runs: int
    # Tokens of the device of an expert group that gets the most, over the mean, as stated.
    routing: float = 1.0

    def words(self, blocks: int | None = None) -> str:
        assumed = f"assume that its {self.experts} experts get equally many tokens"
        if self.routing > 1:
            assumed = f"are those of a device that gets {self.routing:g} times the mean of tokens"
        return (
            f"{self.runs} published runs of mixtures, all with balanced routing, stand behind it: "
            f"times and memory {assumed}."
        )


@dataclass(frozen=True, kw_only=True)
class UnquantizedExperts(Reason):
    """The base model is quantised but its experts are not, since they are not linear layers."""

    kind = "unquantized experts"

    stored: str
    kept_in: str

    def words(self, blocks: int | None = None) -> str:
        return f"The experts stay in {self.kept_in}: {self.stored} covers linear layers only."


@dataclass(frozen=True, kw_only=True)
class NoPeerToPeer(Reason):
    """Devices of a node copy through host memory, so tensor parallelism is not recommended."""

    kind = "no peer to peer"

    device: str
    link: str
    # Bytes per second of the link, and those predicted for collectives through host memory.
    link_rate: float
    host_rate: float
    # Whether the recommended layout has tensor parallelism all the same, because it was asked for.
    divided: bool

    def words(self, blocks: int | None = None) -> str:
        rate = f"{self.host_rate / 1e9:.0f} GB/s through the host"
        if self.divided:
            return f"{self.device} has no peer-to-peer: tensor parallelism exchanges at {rate}."
        return f"{self.device} has no peer-to-peer ({rate}): no tensor parallelism."


@dataclass(frozen=True, kw_only=True)
class Fragile(Reason):
    """The recommended configuration has less headroom than wanted (shares of usable memory)."""

    kind = "fragile"

    free_bytes: float
    headroom: float
    wanted: float
    assumes_even_routing: bool

    def words(self, blocks: int | None = None) -> str:
        return (
            f"Fragile: {show_memory(self.free_bytes)} of usable memory is free "
            f"({percent(self.headroom)}; {percent(self.wanted)} is wanted)"
            f"{', if routing is even' if self.assumes_even_routing else ''}."
        )


# ---- the objective --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LongestSequence(Reason):
    """The longest sequence length found, and what limits it."""

    kind = "longest sequence"

    tokens: int
    limited_by: Literal["memory", "input", "search"]
    # Why a longer sequence is refused; None if input is not the limit.
    refused: str | None = None
    positions: int | None = None

    def words(self, blocks: int | None = None) -> str:
        why = {
            "memory": "Longer ones do not fit.",
            "input": f"Longer ones are refused: {self.refused}.",
            "search": "Longer ones were not searched.",
        }[self.limited_by]
        has = f" The model has {self.positions:,} positions." if self.positions is not None else ""
        return f"Longest sequence length: {self.tokens:,}. {why}{has}"


@dataclass(frozen=True, kw_only=True)
class LeastMemory(Reason):
    """The objective: least memory among configurations with a share of the best throughput."""

    kind = "least memory"

    share: float
    fastest_tokens_per_s: float
    throughput: float

    def words(self, blocks: int | None = None) -> str:
        return (
            f"Objective: least memory with at least {percent(self.share)} of the best throughput "
            f"({show_count(self.fastest_tokens_per_s)} tokens/s)."
        )
