"""Why a plan says what it says, as data: each reason carries its numbers, `report/` words it.

Throughputs are relative to the chosen configuration: -0.1 is 10 % slower. Bytes are per device.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any, Literal

from shardwise.planning.layout import Layout
from shardwise.predict.fit import Parallelism
from shardwise.predict.intervals import Evidence
from shardwise.spec.optimizer import Optimizer
from shardwise.spec.strategy import Strategy
from shardwise.step.profile import Bottleneck, Verdict


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One reason. Its `kind` in JSON is its class in words."""

    @property
    def kind(self) -> str:
        return re.sub(r"(?<!^)(?=[A-Z])", " ", type(self).__name__).lower()

    def to_dict(self) -> dict[str, Any]:
        """The reason as `--json` prints it; what is not known is absent."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            "kind": self.kind,
            **{name: _plain(name, value) for name, value in found.items() if value is not None},
        }


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Strategy):
        return value.model_dump(mode="json", exclude={"within_node"})
    if isinstance(value, Layout):
        return value.to_dict()
    return round(value) if name.endswith("_bytes") else value


# ---- the layout -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SingleDevice(Reason):
    """There is one device: nothing can be sharded."""


@dataclass(frozen=True, kw_only=True)
class StatesFit(Reason):
    """Parameters, gradients and optimizer states fit on every device."""

    state_bytes: float


@dataclass(frozen=True, kw_only=True)
class DoesNotFit(Reason):
    """The configuration of a layout that needs the least memory, which is more than is usable."""

    strategy: Strategy
    verdict: Verdict
    needed_bytes: float
    usable_bytes: int


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
class Compared(Reason):
    """The best configuration of another layout, what is different about it, and its speed."""

    difference: Difference
    strategy: Strategy
    throughput: float
    # Whether the difference of speed is within the error of comparison.
    too_close: bool
    # Settings that differ from those of the chosen one.
    differing: tuple[Setting, ...] = ()
    # Whether it does not fit with the usual prefetch and blocks per unit.
    fits_only_so: bool = False
    # How often per step ZeRO-3 gathers the parameters, where that is the difference.
    gathers: int | None = None
    # The part of the rule that decided against it, where its speed did not.
    decided_by: DecidedBy | None = None
    # The memory it needs beyond that of the chosen one, where a part of the rule decided.
    more_bytes: float | None = None


@dataclass(frozen=True, kw_only=True)
class NetworkCrossover(Reason):
    """The network per device, in bytes/s, at which the choice changes to `layout`."""

    network: float
    direction: Literal["below", "above"]
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class Divided(Reason):
    """Why devices share sequences by tensor or context parallelism, and what it costs."""

    strategy: Strategy
    usable_bytes: int
    # Sequences that the global batch leaves for each device, where that is less than one.
    sequences: float | None = None
    # The best without, and its throughput; None where none fits.
    undivided: Strategy | None = None
    throughput: float = 0.0
    # Whether that leaves less memory free than is wanted, and the chosen one does not.
    lacks_headroom: bool = False
    # The least that any without needs, where none fits.
    needed_undivided_bytes: float | None = None
    # Of the step: collectives inside blocks.
    tensor_share: float | None = None
    context_share: float | None = None
    # Axes whose groups have members on several nodes.
    across_nodes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LinkCrossover(Reason):
    """The bandwidth inside a node, in bytes/s, below which the choice changes to `layout`."""

    link: float
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class Padding(Reason):
    """The share of what devices would hold that is padding, if all of them shared one copy."""

    devices: int
    share: float


# ---- recompute ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class NoRecompute(Reason):
    """Activations fit without recomputation."""


@dataclass(frozen=True, kw_only=True)
class Recomputes(Reason):
    """The memory without recomputation, and the share of the step that recomputation takes."""

    strategy: Strategy
    needed_bytes: float
    needed_without_bytes: float
    usable_bytes: int
    share_of_step: float


# ---- head and loss --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ChunkedLoss(Reason):
    """The memory with the loss in chunks, and with the logits of all tokens at once."""

    chunks: int
    needed_bytes: float
    needed_plain_bytes: float
    usable_bytes: int


@dataclass(frozen=True, kw_only=True)
class RootSplit(Reason):
    """The memory that embedding and head save by being units of their own."""

    saved_bytes: float


# ---- the batch ------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StepBatch(Reason):
    """Tokens per step = data parallel x micro-batch x accumulation x sequence length."""

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
        """Relative to what was asked for; 0 where nothing was."""
        return self.tokens / self.asked - 1 if self.asked else 0.0


@dataclass(frozen=True, kw_only=True)
class MicroBatchGain(Reason):
    """What the micro-batch gains over a smaller one."""

    micro_batch: int
    smaller: int
    gain: float


@dataclass(frozen=True, kw_only=True)
class BatchCapped(Reason):
    """Without a global batch, larger micro-batches than published runs usually have are left out.

    The limits are of a step and of a micro-batch of one device.
    """

    limit_tokens: int
    micro_batch_tokens: int


@dataclass(frozen=True, kw_only=True)
class LargeBatch(Reason):
    """A step has more tokens than published runs use, or most of them where nobody asked."""

    tokens: int
    limit_tokens: int


@dataclass(frozen=True, kw_only=True)
class DataParallelEnds(Reason):
    """Every device, or group, has one sequence per step: its batch cannot shrink any more."""

    devices: int
    tokens: int
    # Devices that work on the same sequences.
    inner: int = 1


# ---- what limits ----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LimitedBy(Reason):
    """What binds, and the gain from twice each bandwidth and from a quarter more memory."""

    binding: Bottleneck
    # "network", or what connects the devices of one node.
    link: str
    # The one of both that binds, where a bandwidth does.
    binding_link: str
    devices: int
    waiting_share: float
    # Gains of the chosen configuration itself.
    twice_network: float
    more_memory: float
    # What connects the devices of one of several nodes, and the gain from twice its bandwidth.
    inner_link: str = ""
    twice_link: float = 0.0
    # What would be chosen with twice the network, and its gain; None where no other gains more.
    with_network: Strategy | None = None
    planned_again: float = 0.0
    # The share that would wait if messages took no longer than their bytes, where that binds.
    waiting_without_latency: float | None = None
    # What more memory would be used for; None where it changes nothing.
    with_memory: Strategy | None = None


@dataclass(frozen=True, kw_only=True)
class Slack(Reason):
    """Usable memory that stays free, and how much slower the network could be."""

    free_bytes: float
    link: str
    devices: int
    # The factor at which a step takes 5 % longer; None where no factor in reach does that.
    network_factor: float | None = None


# ---- tips -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RiskyAlternative(Reason):
    """A configuration that fits if the allocator wastes little; its gain where another fits."""

    strategy: Strategy
    needed_bytes: float
    gain: float | None = None


@dataclass(frozen=True, kw_only=True)
class LowPrecisionReduce(Reason):
    """Reducing gradients in the dtype of the parameters would be faster."""

    dtype: str
    gain: float


@dataclass(frozen=True, kw_only=True)
class CompileGain(Reason):
    """Compiling the blocks would be faster; `runs` published runs say how much."""

    gain: float
    saved_bytes: float
    runs: int


@dataclass(frozen=True, kw_only=True)
class Alternative(Reason):
    """The same job trained in another way that fits, and its predicted speed."""

    change: Literal["optimizer", "adapter", "offload"]
    # As `--optimizer` or `--adapter` takes it.
    value: str
    strategy: Strategy
    tokens_per_s: float
    step_s: float
    needed_bytes: float
    # Of host memory per device, where states are kept there.
    host_bytes: float | None
    # Relative to the recommended configuration; None where none fits.
    throughput: float | None

    @property
    def option(self) -> str:
        """The option of `plan` that asks for it."""
        return "--offload" if self.change == "offload" else f"--{self.change} {self.value}"


@dataclass(frozen=True, kw_only=True)
class ShorterFits(Reason):
    """The longest sequence that fits, where the one asked for does not."""

    tokens: int


@dataclass(frozen=True, kw_only=True)
class OtherParallelism(Reason):
    """Parallelism that may be better and that shardwise does not run for this model."""

    # The most useful first.
    parallelism: tuple[Parallelism, ...]


@dataclass(frozen=True, kw_only=True)
class GradientsUnsharded(Reason):
    """Gradients stay unsharded until the last micro-batch, and what is needed if they did not."""

    accumulate: int
    needed_bytes: float
    needed_if_sharded_bytes: float


# ---- warnings -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StackLeavesOut(Reason):
    """Parallelism that a stack is made of and that the search does not try.

    Where the best without it waits for most of its step, nothing is recommended.
    """

    parallelism: tuple[Parallelism, ...]
    recommended: bool
    # Of the best without it.
    waiting_share: float
    mfu: float | None
    strategy: Strategy | None


@dataclass(frozen=True, kw_only=True)
class BeyondPositions(Reason):
    """The sequence is longer than the model was trained for."""

    seq_len: int
    positions: int


@dataclass(frozen=True, kw_only=True)
class DecimalLength(Reason):
    """The sequence length is in thousands; a multiple of 1,024 was perhaps meant."""

    seq_len: int
    binary: int


@dataclass(frozen=True, kw_only=True)
class FewerDevices(Reason):
    """The batch asked for does not divide over all devices; the plan is for so many of them."""

    devices: int
    of_devices: int
    asked: int
    # Batches next to it that divide over all devices, in tokens.
    neighbours: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class OnlyReplicated(Reason):
    """The trainer does not shard the parameters of this optimizer: no sharded layout is tried."""

    optimizer: Optimizer
    # One with small states that is sharded.
    instead: Optimizer


@dataclass(frozen=True, kw_only=True)
class UnfittedDevice(Reason):
    """No run on such a device was fitted: times follow from its kernels, or from a related one."""

    device: str
    evidence: Evidence


@dataclass(frozen=True, kw_only=True)
class UnfittedExperts(Reason):
    """No run of a mixture of experts was fitted, and routing is assumed to be even."""

    experts: int


@dataclass(frozen=True, kw_only=True)
class UnquantizedExperts(Reason):
    """The base is stored in few bits, its experts are not: they are no linear layers."""

    stored: str
    kept_in: str


@dataclass(frozen=True, kw_only=True)
class NoPeerToPeer(Reason):
    """Devices of a node reach each other through host memory: no tensor parallelism is tried."""

    device: str
    link: str


@dataclass(frozen=True, kw_only=True)
class Fragile(Reason):
    """The recommended configuration leaves less memory free than is wanted, as shares of usable."""

    free_bytes: float
    headroom: float
    wanted: float
    assumes_even_routing: bool


# ---- the objective --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LongestSequence(Reason):
    """The longest sequence, and what keeps it from being longer."""

    tokens: int
    limited_by: Literal["memory", "input", "search"]
    # What is wrong with a longer one, where it is not memory.
    refused: str | None = None
    positions: int | None = None


@dataclass(frozen=True, kw_only=True)
class LeastMemory(Reason):
    """The least memory among configurations with a share of the best throughput."""

    share: float
    fastest_tokens_per_s: float
    throughput: float
