"""Measured kernels of a device: formulas for their seconds, and the fitted coefficients.

`catalogue/kernels.toml` holds the coefficients; `python -m benchmarks.kernels` fits them to
published measurements of kernels. Seconds follow from shapes and the peak or rate of the device:

- attention: call + FLOPs / (efficiency * peak) * (1 + half_span / span)
- matmul and head: call + FLOPs / (efficiency * peak) * (1 + cast_width / width)
- grouped: FLOPs / (efficiency * peak) * (1 + half_tokens / tokens); a full MLP of experts adds a
  call and the factor (1 + routed_width / width)
- element-wise, cast and loss: call + bytes / (share * rate)
- collective: the faster of a protocol for small messages and one for large ones
- dispatch: call + a time per token + bytes / (share * link or network)

Arguments may be numbers or numpy arrays. `predict/kernels.py` predicts steps with them.
"""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from shardwise.spec.record import Record, SpecError, did_you_mean

# A number, or an array of them.
Numbers = Any
Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Family = Literal[
    "attention",
    "matmul",
    "grouped",
    "head",
    "elementwise",
    "cast",
    "loss",
    "collective",
    "dispatch",
]
Passes = Literal["forward", "apart", "together"]

_FILE = Path(__file__).parent / "catalogue" / "kernels.toml"
_ENTRY = re.compile(r'^\[\[("?)([^".\]]+)\1\.([a-z]+)\]\]$', re.MULTILINE)


# ---- formulas -------------------------------------------------------------------------------


def attention_s(
    flops: Numbers,
    span: Numbers,
    peak: Numbers,
    efficiency: Numbers,
    half_span: Numbers,
    call_s: Numbers = 0.0,
) -> Numbers:
    """Seconds of an attention kernel; `span` is keys per query, `flops` those left by the mask."""
    return call_s + flops / (efficiency * peak) * (1.0 + half_span / span)


def product_s(
    flops: Numbers,
    width: Numbers,
    peak: Numbers,
    efficiency: Numbers,
    call_s: Numbers,
    cast_width: Numbers = 0.0,
) -> Numbers:
    """Seconds of a matmul with `width` output columns, and of the cast of its inputs if any."""
    return call_s + flops / (efficiency * peak) * (1.0 + cast_width / width)


def grouped_s(
    flops: Numbers,
    tokens: Numbers,
    width: Numbers,
    peak: Numbers,
    efficiency: Numbers,
    half_tokens: Numbers,
    routed_width: Numbers = 0.0,
    call_s: Numbers = 0.0,
) -> Numbers:
    """Seconds of a grouped matmul whose experts are `width` wide and get `tokens` tokens each."""
    products = flops / (efficiency * peak) * (1.0 + half_tokens / tokens)
    return call_s + products * (1.0 + routed_width / width)


def memory_bound_s(moved: Numbers, rate: Numbers, share: Numbers, call_s: Numbers = 0.0) -> Numbers:
    """Seconds of an operation that must move at least `moved` bytes, at a share of `rate`."""
    return call_s + moved / (share * rate)


def wire_bytes(
    collective: str, moved: Numbers, ranks: Numbers, *, in_switch: bool = False
) -> Numbers:
    """Bytes a rank sends in a collective of `moved` bytes, as nccl-tests counts sizes.

    In a ring of n ranks, 2 (n - 1) / n times as much for an all-reduce and half of that for others;
    1 + 1 / n times if switches sum (`in_switch`).
    """
    if in_switch:
        return moved * (1.0 + 1.0 / ranks)
    rounds = 2.0 if collective.startswith("all-reduce") else 1.0
    return rounds * moved * (ranks - 1.0) / ranks


def collective_s(
    wire: Numbers,
    ranks: Numbers,
    link: Numbers,
    share: Numbers,
    half_peers: Numbers,
    setup_s: Numbers,
    small_share: Numbers,
    call_s: Numbers,
    hop_s: Numbers,
) -> Numbers:
    """Seconds of a collective that sends `wire` bytes over the link of each rank."""
    peers = ranks - 1.0
    slower = wire / link * (1.0 + half_peers / peers)
    large, small = setup_s + slower / share, slower / small_share
    # The minimum of both, which also works for arrays without importing numpy.
    return call_s + hop_s * peers + 0.5 * (large + small - abs(large - small))


def distinct_groups(experts: int, chosen: int, groups: int) -> float:
    """Mean number of `groups` of equally many experts that hold one of a token's `chosen` experts.

    Every choice of different experts is as likely as any other.
    """
    others = experts - experts // groups
    missed = 1.0
    for taken in range(chosen):
        missed *= max(0, others - taken) / (experts - taken)
    return groups * (1.0 - missed)


def dispatch_s(
    tokens: Numbers,
    moved: Numbers,
    rate: Numbers,
    share: Numbers,
    call_s: Numbers,
    token_s: Numbers = 0.0,
) -> Numbers:
    """Seconds to send a rank's `tokens` to their experts or back, `moved` bytes with all copies."""
    return call_s + token_s * tokens + moved / (share * rate)


# ---- records --------------------------------------------------------------------------------


class Kernel(Record):
    """One kernel on one device: its coefficients, and the measurements they were fitted to."""

    device: str
    family: Family
    kernel: str
    dtype: str
    # The rate that shares and efficiencies refer to, in FLOP/s or bytes/s.
    peak: Positive
    rows: Annotated[int, Field(ge=3)]
    sources: Annotated[tuple[str, ...], Field(min_length=1)]
    # Standard deviation of ln(measured / formula), with equal weight for each source.
    spread: NonNegative
    # The same for sources left out of the fit; None if there are too few sources.
    left_out: NonNegative | None = None
    # Range (from, to) of the quantity that the formula depends on; None if not published.
    fitted: tuple[Positive, Positive] | None = None

    @model_validator(mode="after")
    def _ordered(self) -> Kernel:
        """Raise ValueError if the upper end of `fitted` comes first."""
        if self.fitted is not None and self.fitted[0] > self.fitted[1]:
            raise ValueError("fitted: the first end is the lower one")
        return self


class AttentionKernel(Kernel):
    """An attention kernel; coefficients are for heads of 128 and a causal mask.

    Factors for other cases are None if the measurements do not determine them.
    """

    family: Literal["attention"] = "attention"
    passes: Passes
    efficiency: Share
    half_span: NonNegative
    call_s: NonNegative = 0.0
    # Without a mask, relative to a causal mask.
    full_efficiency: Positive | None = None
    full_half_span: Positive | None = None
    # The backward's efficiency and half span, relative to the forward.
    backward: Positive | None = None
    backward_half_span: Positive | None = None
    deterministic: Positive | None = None
    # Factors on the efficiency for other head sizes.
    head_64: Positive | None = None
    head_192: Positive | None = None
    head_256: Positive | None = None
    # The head size of all measurements, if it is only one.
    head_dim: int | None = None

    def seconds(
        self,
        flops: Numbers,
        span: Numbers,
        *,
        backward: bool = False,
        causal: bool = True,
        head_dim: int = 128,
        deterministic: bool = False,
    ) -> Numbers:
        """Seconds of one pass; unknown factors count as 1."""
        efficiency, half = self.efficiency, self.half_span
        if not causal:
            efficiency *= self.full_efficiency or 1.0
            half *= self.full_half_span or 1.0
        if backward:
            efficiency *= self.backward or 1.0
            half *= self.backward_half_span or 1.0
            efficiency *= (self.deterministic or 1.0) if deterministic else 1.0
        heads = {64: self.head_64, 192: self.head_192, 256: self.head_256}
        efficiency *= heads.get(head_dim) or 1.0
        return attention_s(flops, span, self.peak, min(efficiency, 1.0), half, self.call_s)


class ProductKernel(Kernel):
    """A matmul, or a model's head with its loss."""

    family: Literal["matmul", "head"]
    efficiency: Share
    call_s: NonNegative
    # Columns of the output at which the cast of the inputs takes as long as the product.
    cast_width: NonNegative = 0.0

    def seconds(self, flops: Numbers, width: Numbers) -> Numbers:
        """Seconds of one product with `width` output columns."""
        return product_s(flops, width, self.peak, self.efficiency, self.call_s, self.cast_width)


class GroupedKernel(Kernel):
    """Matmuls of several experts in one kernel, or a full MLP of experts."""

    family: Literal["grouped"] = "grouped"
    efficiency: Share
    half_tokens: NonNegative
    # For a full MLP: the width at which routing and combining take as long as the products.
    routed_width: NonNegative = 0.0
    call_s: NonNegative = 0.0

    def seconds(self, flops: Numbers, tokens: Numbers, width: Numbers = 1.0) -> Numbers:
        """Seconds if every expert is `width` wide and gets `tokens` tokens."""
        return grouped_s(
            flops,
            tokens,
            width,
            self.peak,
            self.efficiency,
            self.half_tokens,
            self.routed_width,
            self.call_s,
        )


class MovedKernel(Kernel):
    """A memory-bound operation; bytes are the least that it must read and write."""

    family: Literal["elementwise", "cast", "loss"]
    share: Share
    call_s: NonNegative

    def seconds(self, moved: Numbers) -> Numbers:
        """Seconds to move `moved` bytes."""
        return memory_bound_s(moved, self.peak, self.share, self.call_s)


class CollectiveKernel(Kernel):
    """A collective of the devices of one node."""

    family: Literal["collective"] = "collective"
    ranks: tuple[int, ...]
    share: Share
    # Number of peers (ranks minus 1) at which half of the share is reached.
    half_peers: NonNegative
    setup_s: NonNegative
    # Share of the link that the protocol for small messages reaches.
    small_share: Share
    call_s: NonNegative
    hop_s: NonNegative
    # Whether switches sum the data.
    in_switch: bool = False

    def wire(self, moved: Numbers, ranks: Numbers) -> Numbers:
        """Bytes a rank sends in a call of `moved` bytes, as nccl-tests counts sizes."""
        return wire_bytes(self.kernel, moved, ranks, in_switch=self.in_switch)

    def seconds(self, moved: Numbers, ranks: Numbers) -> Numbers:
        """Seconds of one call of `moved` bytes, as nccl-tests counts sizes."""
        return collective_s(
            self.wire(moved, ranks),
            ranks,
            self.peak,
            self.share,
            self.half_peers,
            self.setup_s,
            self.small_share,
            self.call_s,
            self.hop_s,
        )


class DispatchKernel(Kernel):
    """Dispatch or combine of tokens among the ranks that divide the experts."""

    family: Literal["dispatch"] = "dispatch"
    ranks: tuple[int, ...]
    # Of the link inside a node; of the network if `between_nodes`.
    share: Share
    call_s: NonNegative
    token_s: NonNegative = 0.0
    between_nodes: bool = False

    def seconds(self, tokens: Numbers, moved: Numbers) -> Numbers:
        """Seconds of one pass over `tokens` tokens of a rank, `moved` bytes with all copies.

        A token goes once to each rank with one of its experts (`distinct_groups`), and between
        nodes once to each other node.
        """
        return dispatch_s(tokens, moved, self.peak, self.share, self.call_s, self.token_s)


_RECORDS: dict[str, type[Kernel]] = {
    "attention": AttentionKernel,
    "matmul": ProductKernel,
    "head": ProductKernel,
    "grouped": GroupedKernel,
    "elementwise": MovedKernel,
    "cast": MovedKernel,
    "loss": MovedKernel,
    "collective": CollectiveKernel,
    "dispatch": DispatchKernel,
}
FAMILIES: tuple[str, ...] = get_args(Family)


# ---- the file -------------------------------------------------------------------------------


def read_kernels(text: str, where: str) -> tuple[Kernel, ...]:
    """The kernels in a TOML text; raises SpecError if it is invalid. `where` names it in errors."""
    found: list[Kernel] = []
    for device, families in tomllib.loads(text).items():
        for family, entries in families.items():
            if family not in _RECORDS:
                raise SpecError(f"{where}: {device}: unknown family {family!r}")
            for number, entry in enumerate(entries, 1):
                record = _RECORDS[family]
                named = f"{where}: {device}.{family}[{number}]"
                data = {"device": device, "family": family, **entry}
                found.append(record.read(data, where=named))
    return tuple(found)


@cache
def _texts() -> dict[str, str]:
    """The TOML text of each device's entries, so that one device can be parsed alone."""
    text = _FILE.read_text(encoding="utf-8")
    found: dict[str, str] = {}
    headers = list(_ENTRY.finditer(text))
    for header, following in zip(headers, [*headers[1:], None], strict=True):
        end = following.start() if following else len(text)
        found[header[2]] = found.get(header[2], "") + text[header.start() : end]
    return found


def kernel_devices() -> list[str]:
    """Names of devices with measured kernels; some are not in the catalogue of devices."""
    return list(_texts())


@cache
def kernels_of(device: str) -> tuple[Kernel, ...]:
    """The measured kernels of one device; raise SpecError for a device without any."""
    folded = {name.lower(): name for name in _texts()}
    name = folded.get(device.lower())
    if name is None:
        hint = did_you_mean(device, _texts()) or "; see 'shardwise catalog kernels'"
        raise SpecError(f"no measured kernels of device {device[:60]!r}{hint}")
    return read_kernels(_texts()[name], _FILE.name)


@cache
def find_kernel(device: str, family: Family, kernel: str, dtype: str) -> Kernel | None:
    """The measured kernel with this name and dtype; None if it was not measured on this device."""
    named = f'kernel = "{kernel}"\ndtype = "{dtype}"\n'
    for entry in re.split(r"^(?=\[\[)", _texts().get(device, ""), flags=re.MULTILINE):
        if named in entry and f".{family}]]" in entry:
            return read_kernels(entry, _FILE.name)[0]
    return None


def all_kernels() -> tuple[Kernel, ...]:
    """Every measured kernel, in the order of the file."""
    return tuple(kernel for device in kernel_devices() for kernel in kernels_of(device))
