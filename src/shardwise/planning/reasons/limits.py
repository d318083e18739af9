"""Reasons about what limits a plan, what would be faster, and what would make it fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from shardwise.planning.reasons.reason import Reason, compared_words, share_words
from shardwise.predict.fit import Parallelism
from shardwise.spec.quantity import show_count
from shardwise.spec.strategy import Strategy
from shardwise.spec.strategy_words import configuration_words
from shardwise.step.memory_words import show_memory
from shardwise.step.profile import Bottleneck
from shardwise.step.words import capital, parallelism_words, percent

# Memory savings below this are not shown.
MIN_SAVED_BYTES = 2**30 // 10
# Smaller shares of a step are not shown.
SEEN_SHARE = 0.01
# Network slack above this factor is shown as "over" it.
MOST_SLACK = 10

# ---- what limits ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LimitedBy(Reason):
    """What limits the plan, and the gain from twice each bandwidth and from 25 % more memory."""

    kind = "limited by"

    binding: Bottleneck
    # "network", or on a single node the name of the link between its devices.
    link: str
    # Which of network and link limits, if a bandwidth does.
    binding_link: str
    devices: int
    waiting_share: float
    # Gain of the recommended configuration, and of the fastest one with more memory.
    twice_network: float
    more_memory: float
    # With several nodes, the link inside a node, and the gain from twice its bandwidth.
    inner_link: str = ""
    twice_link: float = 0.0
    # The choice with twice the network, and its gain; None if no other configuration gains more.
    with_network: Strategy | None = None
    planned_again: float = 0.0
    # The share of the step that would wait without latency; None unless latency limits.
    waiting_without_latency: float | None = None
    # The choice with more memory; None if it is the same.
    with_memory: Strategy | None = None
    # The optimizer's share of the step, and the gain from four times the tokens per step, by
    # accumulation; None unless the optimizer limits.
    optimizer_share: float = 0.0
    larger_batch: float | None = None

    def words(self, blocks: int | None = None) -> str:
        limit, gains = self._limit(), self._bandwidth_gains(blocks)
        if self.larger_batch is not None:
            gains.insert(0, f"4x the tokens per step, accumulated: {_gain(self.larger_batch)}")
        if self.binding == "memory" and self.with_memory is not None:
            then = configuration_words(self.with_memory, blocks=blocks)
            limit += f": 25% more would allow {then} ({_gain(self.more_memory)})"
        else:
            gains.append(f"25% more memory: {_gain(self.more_memory)}")
        return f"{limit}. {'; '.join(gains)}." if gains else f"{limit}."

    def brief(self, blocks: int | None = None) -> str:
        """The full words without the configurations that more memory or bandwidth would allow."""
        return replace(self, with_memory=None, with_network=None).words(blocks)

    def _limit(self) -> str:
        waits = f"{percent(self.waiting_share)} of the step waits for communication"
        if self.binding == "latency":
            without = percent(self.waiting_without_latency or 0.0)
            return f"Limited by latency ({waits}; without latency it would be {without})"
        if self.binding == "bandwidth":
            seen = self.waiting_share >= SEEN_SHARE
            why = waits if seen else "communication slows the compute that it overlaps"
            return f"Limited by {self.binding_link} bandwidth ({why})"
        if self.binding == "optimizer":
            return f"Limited by the optimizer ({percent(self.optimizer_share)} of the step)"
        return f"Limited by {self.binding}"

    def _bandwidth_gains(self, blocks: int | None) -> list[str]:
        gains = []
        if self.devices > 1:
            gain = f"2x the {self.link} bandwidth: {_gain(self.twice_network)}"
            if self.with_network is not None:
                other = configuration_words(self.with_network, blocks=blocks)
                gain += f", or {_gain(self.planned_again)} with {other}"
            gains.append(gain)
        if self.twice_link >= SEEN_SHARE:
            gains.append(f"2x the {self.inner_link} bandwidth: {_gain(self.twice_link)}")
        return gains


def _gain(gain: float) -> str:
    return "no gain" if gain < 0.0005 else f"+{share_words(gain)}"


@dataclass(frozen=True, kw_only=True)
class Slack(Reason):
    """Usable bytes that stay free, and how many times slower the network could be."""

    kind = "slack"

    free_bytes: float
    link: str
    devices: int
    # The factor at which a step takes 5 % longer; None if no factor that was tried has this effect.
    network_factor: float | None = None

    def words(self, blocks: int | None = None) -> str:
        free, factor = show_memory(self.free_bytes), self.network_factor
        if factor is None or factor <= 1.05:
            return f"Headroom: {free} of usable memory."
        lower = f"over {MOST_SLACK}x" if factor > MOST_SLACK else f"{factor:.1f}x"
        return (
            f"Headroom: {free} of usable memory; {self.link} bandwidth could be {lower} lower "
            "before steps take 5% longer."
        )


# ---- faster options -------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RiskyAlternative(Reason):
    """A configuration that fits if the allocator wastes little; `gain` is relative to the winner.

    `gain` is None without a winner.
    """

    kind = "risky alternative"

    strategy: Strategy
    needed_bytes: float
    gain: float | None = None

    def words(self, blocks: int | None = None) -> str:
        faster = f"{share_words(self.gain)} faster" if self.gain is not None else "likely to fit"
        return (
            f"At risk of running out of memory, but {faster}: "
            f"{configuration_words(self.strategy, blocks=blocks)} (needs "
            f"{show_memory(self.needed_bytes)}; fits if the allocator wastes little)."
        )


@dataclass(frozen=True, kw_only=True)
class LowPrecisionReduce(Reason):
    """Reducing gradients in the dtype of the parameters would be faster."""

    kind = "low precision reduce"

    dtype: str
    gain: float

    def words(self, blocks: int | None = None) -> str:
        return (
            f"Reducing gradients in {self.dtype} would be {share_words(self.gain)} faster, but "
            "changes the arithmetic: --allow-low-precision-reduce."
        )


@dataclass(frozen=True, kw_only=True)
class CompressionGain(Reason):
    """DDP with compressed gradients would be faster, but changes the arithmetic."""

    kind = "compression gain"

    strategy: Strategy
    # Relative to the recommended configuration.
    gain: float
    needed_bytes: float

    def words(self, blocks: int | None = None) -> str:
        compress = self.strategy.compress
        return (
            f"DDP with compressed gradients ({compress}) would be {share_words(self.gain)} faster "
            f"and needs {show_memory(self.needed_bytes)}, but changes the arithmetic: "
            f'kind = "ddp" and compress = "{compress}" in [strategy].'
        )


@dataclass(frozen=True, kw_only=True)
class CompileGain(Reason):
    """Compiling the blocks would be faster, as fitted on `runs` published runs."""

    kind = "compile gain"

    gain: float
    saved_bytes: float
    runs: int

    def words(self, blocks: int | None = None) -> str:
        saved = self.saved_bytes
        memory = f", {show_memory(saved)} less memory" if saved >= MIN_SAVED_BYTES else ""
        return (
            f"torch.compile: predicted {share_words(self.gain)} faster{memory} (fitted on "
            f"{self.runs} published runs): --compile."
        )


@dataclass(frozen=True, kw_only=True)
class Alternative(Reason):
    """A change of optimizer, adapter, states or offload with which the job fits, and its speed."""

    kind = "alternative"

    change: Literal["optimizer", "adapter", "states", "offload"]
    # The value for `--optimizer`, `--adapter` or `--states`; of offload, the options.
    value: str
    strategy: Strategy
    tokens_per_s: float
    step_s: float
    needed_bytes: float
    # Host memory per device; None unless states are offloaded.
    host_bytes: float | None
    # Relative to the recommended configuration; None if there is none.
    throughput: float | None

    @property
    def option(self) -> str:
        """The command line option for this change."""
        return self.value if self.change == "offload" else f"--{self.change} {self.value}"

    @property
    def asked(self) -> str:
        """What to type: an option of `plan`."""
        return self.option

    @property
    def needs(self) -> str:
        """The memory of a device, and of its host if that is used, as words."""
        host = self.host_bytes
        also = f" and {show_memory(host)} of host memory per device" if host is not None else ""
        return f"needs {show_memory(self.needed_bytes)}{also}"

    def words(self, blocks: int | None = None) -> str:
        speed = f" ({compared_words(self.throughput)})" if self.throughput is not None else ""
        host = ""
        if self.host_bytes is not None:
            host = (
                f", and {show_memory(self.host_bytes)} of host memory per device (host links and "
                "memory are assumed, not measured)"
            )
        return (
            f"Alternative: {self.asked}, {show_count(self.tokens_per_s)} tokens/s{speed}, needs "
            f"{show_memory(self.needed_bytes)}{host}: "
            f"{configuration_words(self.strategy, blocks=blocks)}."
        )

    def brief(self, blocks: int | None = None) -> str:
        return f"{self.asked}: {show_count(self.tokens_per_s)} tokens/s, {self.needs}."


@dataclass(frozen=True, kw_only=True)
class ShorterFits(Reason):
    """The longest sequence that fits, given if the requested one does not."""

    kind = "shorter fits"

    tokens: int

    def words(self, blocks: int | None = None) -> str:
        return (
            f"Sequences of up to {self.tokens:,} tokens fit. Longer ones need more devices or more "
            "memory."
        )

    def brief(self, blocks: int | None = None) -> str:
        return f"Sequences of up to {self.tokens:,} tokens."


@dataclass(frozen=True, kw_only=True)
class OtherParallelism(Reason):
    """Parallelism that may be better and that shardwise does not run for this model."""

    kind = "other parallelism"

    # The most useful first.
    parallelism: tuple[Parallelism, ...]

    def words(self, blocks: int | None = None) -> str:
        names = capital(parallelism_words(self.parallelism))
        are, them = ("are", "them") if len(self.parallelism) > 1 else ("is", "it")
        return f"{names} {are} not considered: shardwise does not run {them} for this model."

    def brief(self, blocks: int | None = None) -> str:
        return f"Not considered: {parallelism_words(self.parallelism)} (not run for this model)."


@dataclass(frozen=True, kw_only=True)
class GradientsUnsharded(Reason):
    """Gradients stay unsharded until the last micro-batch; and the memory needed otherwise."""

    kind = "gradients unsharded"

    accumulate: int
    needed_bytes: float
    needed_if_sharded_bytes: float

    def words(self, blocks: int | None = None) -> str:
        return (
            "Cause: gradients stay unsharded until the last of "
            f"{self.accumulate} micro-batches. Reduced in every micro-batch, it would need "
            f"{show_memory(self.needed_if_sharded_bytes)}."
        )
