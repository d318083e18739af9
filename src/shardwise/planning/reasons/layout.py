"""Reasons for a layout: what fits, comparisons with other layouts, and crossovers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from shardwise.planning.choice import WANTED_HEADROOM
from shardwise.planning.layout import Layout
from shardwise.planning.reasons.reason import Reason, compared_words, relative_words, share_words
from shardwise.spec.mesh import InnerAxis
from shardwise.spec.quantity import write_byte_rate, write_rate
from shardwise.spec.recompute import show_recompute
from shardwise.spec.strategy import Strategy
from shardwise.spec.strategy_words import layout_words, unusual_settings
from shardwise.step.memory_words import AT_RISK, room_words, shortfall_words, show_memory
from shardwise.step.profile import Verdict
from shardwise.step.words import VERDICTS, capital, percent

Setting = Literal[
    "recompute",
    "micro_batch",
    "prefetch",
    "forward_prefetch",
    "blocks_per_unit",
    "grad_sync",
    "reshard_after_forward",
    "loss",
]
DecidedBy = Literal[
    "objective",
    "batch",
    "headroom",
    "memory",
    "simplicity",
    "fewer devices per sequence",
    "smaller groups",
]
Difference = Literal[
    "replicated",
    "sharded",
    "gathered once",
    "gathered twice",
    "over all devices",
    "in groups",
    "divided",
    "divided otherwise",
]


@dataclass(frozen=True, kw_only=True)
class SingleDevice(Reason):
    """There is one device: nothing can be sharded."""

    kind = "single device"

    def words(self, blocks: int | None = None) -> str:
        return "One device: there is nothing to shard."


@dataclass(frozen=True, kw_only=True)
class StatesFit(Reason):
    """Parameters, gradients and optimizer states fit on every device."""

    kind = "states fit"

    state_bytes: float

    def words(self, blocks: int | None = None) -> str:
        return (
            f"No sharding needed: model states ({show_memory(self.state_bytes)} of parameters, "
            "gradients and optimizer states) fit on every device."
        )

    def brief(self, blocks: int | None = None) -> str:
        size = show_memory(self.state_bytes)
        return f"No sharding needed: {size} of model states fit everywhere."


_WHY_NOT = {
    "ddp": "model states must be sharded",
    "zero2": "it keeps all parameters gathered",
    "zero1": "it keeps all parameters and gradients",
}


@dataclass(frozen=True, kw_only=True)
class DoesNotFit(Reason):
    """A layout does not fit or is at risk, even its configuration with the least memory."""

    kind = "does not fit"

    strategy: Strategy
    verdict: Verdict
    needed_bytes: float
    usable_bytes: int

    def words(self, blocks: int | None = None) -> str:
        """The layout, its verdict and shortfall, then why its kind needs so much memory.

        For the verdict "at risk", AT_RISK takes the place of the reason. `blocks` is not used.
        """
        if self.verdict == "at risk":
            return f"{self._shortfall()}. {AT_RISK}"
        why = _WHY_NOT.get(self.strategy.kind)
        return f"{self._shortfall()}; {why}." if why else f"{self._shortfall()}."

    def brief(self, blocks: int | None = None) -> str:
        return f"{self._shortfall()}."

    def _shortfall(self) -> str:
        """The layout, its verdict, and by how much it exceeds the usable memory."""
        judged = VERDICTS[self.verdict].words
        short = shortfall_words(self.needed_bytes, self.usable_bytes)
        return f"{layout_words(self.strategy)} {judged}: {short}"


_DECIDED_BY = {
    "batch": "its batch is farther from the one asked for",
    "headroom": f"it leaves less than {percent(WANTED_HEADROOM)} of usable memory free",
    "simplicity": "the recommended one is simpler",
    "fewer devices per sequence": "the recommended one has less tensor and context parallelism",
    "smaller groups": "the recommended one communicates in smaller groups",
}


@dataclass(frozen=True, kw_only=True)
class Compared(Reason):
    """The best configuration of another layout, how it differs, and its relative speed."""

    kind = "compared"

    difference: Difference
    strategy: Strategy
    throughput: float
    # Whether the difference of speed is within the comparison error.
    too_close: bool
    # Settings that differ from those of the recommended configuration.
    differing: tuple[Setting, ...] = ()
    # Whether this layout fits only with unusual prefetch or blocks per unit.
    fits_only_so: bool = False
    # How often per step ZeRO-3 gathers the parameters; None if that is not the difference.
    gathers: int | None = None
    # The part of the choice rule that decided against a faster layout; None for a slower one.
    decided_by: DecidedBy | None = None
    # Needed bytes minus those of the recommended configuration; None unless `decided_by` is set.
    more_bytes: float | None = None

    def words(self, blocks: int | None = None) -> str:
        speed, settings = self._speed(), ", ".join(self._settings(blocks))
        if self.fits_only_so:
            compared = f"fits only with {settings}, then is {speed}"
        else:
            compared = f"is {speed} (with {settings})" if settings else f"is {speed}"
        return f"{self._difference()} {compared}{self._decision()}."

    def brief(self, blocks: int | None = None) -> str:
        return f"{layout_words(self.strategy)} is {self._speed()}{self._decision()}."

    def _speed(self) -> str:
        return relative_words(self.throughput, self.too_close)

    def _difference(self) -> str:
        """The layout and how it differs, as the subject of a sentence."""
        layout = layout_words(self.strategy)
        if self.difference == "over all devices":
            return f"{layout} over all {self.strategy.devices} devices"
        if self.difference not in ("gathered once", "gathered twice"):
            return layout
        often = "twice"
        if self.gathers is not None and self.gathers != 2:
            often = f"twice per micro-batch ({self.gathers} times per step)"
        if self.difference == "gathered twice":
            return f"{layout} gathers parameters {often} instead of once per step and"
        conjunction = ", but" if self.throughput <= 0 and not self.too_close else " and"
        return f"{layout} gathers parameters once per step instead of {often}{conjunction}"

    def _decision(self) -> str:
        """Why a faster layout was not chosen, as the end of a sentence; empty for a slower one."""
        if self.decided_by is None:
            return ""
        if self.decided_by in ("objective", "memory"):
            why = f"it needs {show_memory(self.more_bytes or 0)} more memory"
        else:
            why = _DECIDED_BY[self.decided_by]
        return f"{'; ' if self.too_close else ', but '}{why}"

    def _settings(self, blocks: int | None) -> list[str]:
        """The settings of this layout that differ from the recommended ones, as words."""
        strategy, settings = self.strategy, []
        if "recompute" in self.differing:
            settings.append(_recompute_setting(strategy, blocks))
        if "micro_batch" in self.differing:
            settings.append(f"micro-batch {strategy.micro_batch}")
        if "loss" in self.differing and strategy.loss == "plain":
            settings.append("plain loss")
        return [*settings, *unusual_settings(strategy)]


def _recompute_setting(strategy: Strategy, blocks: int | None) -> str:
    if isinstance(strategy.recompute, str):
        return "no recompute" if strategy.recompute == "none" else f"{strategy.recompute} recompute"
    return f"recompute of {show_recompute(strategy.recompute, blocks)}"


@dataclass(frozen=True, kw_only=True)
class NetworkCrossover(Reason):
    """The network per device, in bytes/s, at which the choice changes to `layout`."""

    kind = "network crossover"

    network: float
    direction: Literal["below", "above"]
    layout: Layout

    def words(self, blocks: int | None = None) -> str:
        return (
            f"{self.direction.capitalize()} {write_rate(self.network)} per device, "
            f"{layout_words(self.layout)} would be recommended."
        )


_EXCHANGES: dict[InnerAxis, str] = {
    "tensor": "all-gathers and reduce-scatters of tensor groups",
    "context": "exchanges of context groups",
    "expert": "sending tokens to their experts and back",
}


@dataclass(frozen=True, kw_only=True)
class Divided(Reason):
    """Why devices divide layers by tensor, context or expert parallelism, and what it costs."""

    kind = "divided"

    strategy: Strategy
    usable_bytes: int
    # Sequences that the global batch leaves for each device, where that is less than one.
    sequences: float | None = None
    # The best configuration without such parallelism (None if none fits), and its throughput.
    undivided: Strategy | None = None
    throughput: float = 0.0
    # Whether `undivided` leaves less headroom than wanted, and the recommended one does not.
    lacks_headroom: bool = False
    # The least bytes needed without such parallelism; None if a configuration without it fits.
    needed_undivided_bytes: float | None = None
    # Shares of the step spent in collectives inside blocks, by axis.
    shares: dict[InnerAxis, float] = field(default_factory=dict)
    # Axes whose groups have members on several nodes.
    across_nodes: tuple[str, ...] = ()

    def words(self, blocks: int | None = None) -> str:
        degrees = " × ".join(f"{axis} {getattr(self.strategy, axis)}" for axis in self.shares)
        costs = [
            f"{share_words(share)} of the step in {_EXCHANGES[axis]}"
            + (" between nodes" if axis in self.across_nodes else " inside the node")
            for axis, share in self.shares.items()
        ]
        return f"{capital(degrees)}: {self._why()}; it costs {' and '.join(costs)}."

    def _why(self) -> str:
        if self.sequences is not None:
            return f"the global batch leaves {self.sequences:.2g} sequences per device"
        if self.undivided is None:
            least = room_words(self.needed_undivided_bytes or 0, self.usable_bytes)
            kinds = " or ".join(self.shares)
            return f"without {kinds} parallelism no configuration fits (at least {least})"
        speed = compared_words(self.throughput)
        without = f"without it, {layout_words(self.undivided)} is {speed}"
        if self.lacks_headroom:
            without += f" and leaves less than {percent(WANTED_HEADROOM)} of usable memory free"
        return without


@dataclass(frozen=True, kw_only=True)
class UndividedExperts(Reason):
    """Why the experts are not divided: what the best degree of it could reach at most."""

    kind = "undivided experts"

    expert: int
    # An upper bound of its throughput, relative to the recommendation: all else hidden.
    throughput: float

    def words(self, blocks: int | None = None) -> str:
        most = f"at most {percent(self.throughput)} faster" if self.throughput > 0 else "slower"
        return (
            f"Experts are not divided: expert {self.expert} would be {most} even if only computing "
            "and sending tokens to their experts took time."
        )


@dataclass(frozen=True, kw_only=True)
class LinkCrossover(Reason):
    """The bandwidth inside a node, in bytes/s, below which the choice changes to `layout`."""

    kind = "link crossover"

    link: float
    layout: Layout

    def words(self, blocks: int | None = None) -> str:
        return (
            f"Below {write_byte_rate(self.link)} inside a node, {layout_words(self.layout)} would "
            "be recommended."
        )


@dataclass(frozen=True, kw_only=True)
class Padding(Reason):
    """The share of padding in sharded memory, if all devices shared one copy of the states."""

    kind = "padding"

    devices: int
    share: float

    def words(self, blocks: int | None = None) -> str:
        return (
            f"Sharded over {self.devices:,} devices, {percent(self.share)} of the sharded memory "
            "is padding: the rows of some tensors do not divide evenly."
        )
