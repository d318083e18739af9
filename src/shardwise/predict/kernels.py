"""The coefficients of a device with a software: its measured kernels, and what runs add to them.

Kernels give what a device can do: its products, its attention, its links. Runs give what kernels
cannot: the share of a burst that a step sustains, contention, the optimizer, the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple, get_args

from shardwise.predict.level import correction
from shardwise.predict.rates import Coefficients
from shardwise.spec.catalogue import device_coefficients, devices, step_coefficients
from shardwise.spec.cluster import ClusterSpec, DeviceSpec
from shardwise.spec.dtype import LinearDType
from shardwise.spec.kernels import (
    AttentionKernel,
    CollectiveKernel,
    Family,
    Kernel,
    ProductKernel,
    find_kernel,
)
from shardwise.spec.record import SpecError
from shardwise.spec.software import (
    Architecture,
    Software,
    architecture,
    find_software,
    is_known,
)
from shardwise.spec.strategy import Strategy

# Devices with measured kernels whose shares of the peak stand for others of a generation, the
# nearest first.
_MEASURED: Mapping[Architecture, tuple[str, ...]] = {
    "volta": ("A100-80GB",),
    "ampere": ("A100-80GB",),
    "ada": ("L40S", "A100-80GB"),
    "hopper": ("H100-SXM", "H200-SXM"),
    "blackwell": ("B200", "GB200", "GB300", "B300"),
    "blackwell-pcie": ("RTX-PRO-6000-Server",),
    "cdna": ("MI300X", "MI355X"),
}
# GeForce cards: tensor cores that accumulate in fp32 run at half their rate, so power limits them
# less than the cards for servers of their generation.
_HALF_RATE = ("RTX-3090", "RTX-4090", "RTX-5090")
# Devices of another name with the same chip.
_SAME = {"A100-40GB": "A100-80GB", "A800-80GB": "A100-80GB", "H100-96GB-500W": "H100-SXM"}
# Generations whose tensor cores have no 8 bits, and those that scale blocks of 32 values.
_SIXTEEN_BITS: tuple[Architecture, ...] = ("volta", "ampere")
_SCALED_IN_BLOCKS: tuple[Architecture, ...] = ("blackwell", "blackwell-pcie")
_PRODUCTS = ("library", "AITER tuned")
# Where only a forward was measured: the backward relative to it, as of FlashAttention 2 and cuDNN.
_BACKWARD = 0.86
# Of links without measured collectives, as of NVLink 4.
_LINK, _HOP_S = 0.75, 4e-6
# Ranks of a full node, for which links are priced.
_RANKS = 8
# Of the link, and of each call, for collectives inside blocks: between what an all-gather and an
# all-reduce of 8 H100 reach; the latency of a small collective of NCCL in a node.
_EXCHANGE, _EXCHANGE_S = 0.8, 2e-5
# Tokens per expert that take as long again as the products, of kernels for training on B200.
_GROUPED_HALF_TOKENS = 300.0


# Bytes per logit of a loss of 16-bit logits, which reads and writes them in the forward and in the
# backward, relative to a cast to fp32 and the element-wise operations on that.
_LOSS_AS_IT_IS = 8.0 - 42.0


_SUSTAINED = "sustained_"


class _Place(NamedTuple):
    """A device: what decides which measured kernels stand for it."""

    name: str
    kind: Architecture
    nvlink: bool
    half_rate: bool = False

    @classmethod
    def of(cls, device: DeviceSpec) -> _Place:
        name = _SAME.get(device.name, device.name)
        nvlink, half_rate = "NVLink" in device.link, name in _HALF_RATE
        return cls(name, architecture(device), nvlink, half_rate)


def coefficients_for(cluster: ClusterSpec) -> Coefficients | None:
    """What was calibrated, else what was fitted to the device, else its kernels; None for a CPU.

    Measured steps of the cluster's own correct all of them alike.
    """
    found = _without_level(cluster)
    if found is None or cluster.level is None:
        return found
    return found._replace(level=found.level * correction(cluster.level))


def _without_level(cluster: ClusterSpec) -> Coefficients | None:
    if cluster.calibration is not None:
        return Coefficients(**cluster.calibration.coefficients())
    device = cluster.device
    if device.is_cpu:
        return None
    own = device_coefficients(device.name)
    if own is not None:
        return Coefficients(**own)
    return catalogue_coefficients(cluster)


def catalogue_coefficients(cluster: ClusterSpec) -> Coefficients:
    """Those of its device and its software, from kernels and published runs."""
    software = find_software(cluster.software)
    return coefficients_of(cluster.device, software, step_coefficients())


class Origin(NamedTuple):
    """A kernel's figures, and whether they were measured on this very device."""

    kernel: Kernel
    own: bool
    # What software calls it; the name of its figures may add how they were measured.
    name: str


def measured_attention(device: DeviceSpec, software: Software) -> Origin:
    """Its attention kernel; of a relative, or of serving, where training's was not measured."""
    return _measured_attention(_Place.of(device), software.attention_on(device))


@cache
def _measured_attention(place: _Place, name: str) -> Origin:
    for kernel in dict.fromkeys((name, "FA2")):
        # Kernels of serving were measured forward only, but on a nearer device.
        found = _nearest(place, "attention", kernel, f"{kernel} prefill")
        if found is not None:
            return found._replace(name=kernel)
    raise AssertionError("each generation has a measured attention kernel")


def measured_products(device: DeviceSpec) -> Origin:
    """Its matrix products, in bf16 by the vendor's library."""
    return _measured_products(_Place.of(device))


@cache
def _measured_products(place: _Place) -> Origin:
    found = _nearest(place, "matmul", *_PRODUCTS)
    assert found is not None, "each generation has measured products"
    return found


def _nearest(place: _Place, family: Family, *names: str, dtype: str = "bf16") -> Origin | None:
    """The first of these kernels on the device itself, else on its nearest relative with one."""
    near = (*(_MEASURED["ampere"] if place.half_rate else ()), *_MEASURED[place.kind])
    for candidate in dict.fromkeys((place.name, *near)):
        for name in names:
            found = find_kernel(candidate, family, name, dtype)
            if found is not None:
                return Origin(found, own=candidate == place.name, name=name)
    return None


def _products(device: DeviceSpec) -> dict[str, float]:
    kernel = measured_products(device).kernel
    assert isinstance(kernel, ProductKernel)
    return {"matmul_efficiency": kernel.efficiency, "product_s": kernel.call_s}


@cache
def low_bit_products(place: _Place, dtype: LinearDType) -> Mapping[str, float]:
    """Products in fewer bits relative to 16 bits, where both were measured on one device.

    Scales per 32 values were measured in no kernel of training alone: they cost what one scale per
    tensor does. Empty where no relative has products of that kind.
    """
    name = "nvfp4" if dtype == "nvfp4" else "fp8"
    found = _nearest(place, "matmul", *_PRODUCTS, dtype=name)
    if found is None or (dtype == "mxfp8" and place.kind not in _SCALED_IN_BLOCKS):
        return {}
    low = found.kernel
    wide = _measured_products(_Place(low.device, place.kind, place.nvlink)).kernel
    assert isinstance(low, ProductKernel)
    assert isinstance(wide, ProductKernel)
    # Both peaks are of the device that has the products in fewer bits, where it is known.
    own = devices().get(low.device)
    peak = (own.peak_flops("bf16") if own else None) or wide.peak
    relative = wide.efficiency * peak / (low.efficiency * low.peak)
    return {name: relative, f"{name}_cast_width": low.cast_width}


def check_products(cluster: ClusterSpec, strategy: Strategy) -> None:
    """Raise SpecError where products in few bits are asked of a device that has none."""
    dtype = strategy.linear_dtype
    if dtype is not None and not can_multiply(cluster.device, dtype):
        raise SpecError(
            f"precision: {cluster.device.name} has no products in {dtype}, or none that were "
            "measured; use --precision bf16"
        )


def can_multiply(device: DeviceSpec, dtype: LinearDType) -> bool:
    """Whether a device has products in this dtype that are priced."""
    if device.is_cpu or not is_known(device):
        return False
    place = _Place.of(device)
    return place.kind not in _SIXTEEN_BITS and bool(low_bit_products(place, dtype))


def _low_bits(place: _Place, fitted: Mapping[str, float]) -> dict[str, float]:
    """Their kernels in a step: what runs take of them, and of the casts as they were measured."""
    found: dict[str, float] = {}
    for dtype in get_args(LinearDType):
        for name, value in low_bit_products(place, dtype).items():
            factor = "low_bit_casts" if name.endswith("cast_width") else "low_bit_products"
            found[name] = value * fitted[factor]
    return found


def _attention(device: DeviceSpec, software: Software) -> dict[str, float]:
    kernel = measured_attention(device, software).kernel
    assert isinstance(kernel, AttentionKernel)
    efficiency, backward = kernel.efficiency, kernel.backward or _BACKWARD
    if kernel.passes == "together":
        # Five of seven products are the backward's.
        efficiency *= (1.0 + 2.5 / backward) / 3.5
    return {
        "attention_efficiency": efficiency,
        "attention_half_span": kernel.half_span,
        "attention_backward": backward,
        "attention_backward_span": kernel.backward_half_span or 1.0,
        "narrow_heads": kernel.head_64 or _narrow(_Place.of(device), kernel.kernel),
    }


@cache
def _narrow(place: _Place, name: str) -> float:
    """Of heads of 64: what a relative shows with that kernel."""
    for candidate in _MEASURED[place.kind]:
        found = find_kernel(candidate, "attention", name, "bf16")
        if isinstance(found, AttentionKernel) and found.head_64 is not None:
            return found.head_64
    return 1.0


@cache
def _links(place: _Place) -> dict[str, float]:
    found = _nearest(place, "collective", "all-gather", dtype="any")
    gather = found.kernel if found and (found.own or place.nvlink) else None
    if not isinstance(gather, CollectiveKernel):
        return {"link_efficiency": _LINK, "hop_latency_s": _HOP_S}
    peers = _RANKS - 1
    share = gather.share / (1.0 + gather.half_peers / peers)
    hop_s = (gather.setup_s + gather.call_s) / peers + gather.hop_s
    return {"link_efficiency": share, "hop_latency_s": hop_s, **_reduced(gather.device, share)}


def _reduced(device: str, share: float) -> dict[str, float]:
    """How much more of the link an all-reduce gets, where switches add up."""
    switch = find_kernel(device, "collective", "all-reduce in the switch", "any")
    if not isinstance(switch, CollectiveKernel):
        return {}
    ring = 2.0 * (_RANKS - 1) / _RANKS
    return {"reduce_speedup": max(1.0, switch.share * ring / (1.0 + 1.0 / _RANKS) / share)}


def coefficients_of(
    device: DeviceSpec, software: Software, fitted: Mapping[str, float]
) -> Coefficients:
    """All that a price needs; `fitted` is what runs give, by the names of coefficients.

    In it are shares of measured products that a step keeps up, by generation of devices: one that
    no run was measured on has the mean of the others. What is of one stack is named "stack.name".
    """
    shares = {name: value for name, value in fitted.items() if name.startswith(_SUSTAINED)}
    mean = sum(shares.values()) / len(shares)
    sustained = shares.get(_SUSTAINED + architecture(device), mean)
    shared = {name: value for name, value in fitted.items() if name in Coefficients._fields}
    own = _of_stack(software.stack, fitted)
    by_head = {
        "plain": 0.0,
        "16-bit loss": _LOSS_AS_IT_IS,
        "vocabulary chunks": fitted["head_bytes"],
    }
    products, attention = _products(device), _attention(device, software)
    attention["attention_efficiency"] *= own.pop("attention_factor", 1.0)
    known = {
        "matmul_half_s": 0.0,
        "grouped_half_tokens": _GROUPED_HALF_TOKENS,
        "exchange_efficiency": _EXCHANGE,
        "exchange_latency_s": _EXCHANGE_S,
        **products,
        **attention,
        **_links(_Place.of(device)),
        **_low_bits(_Place.of(device), fitted),
        **shared,
        **own,
        "matmul_efficiency": products["matmul_efficiency"] * sustained,
        "head_bytes": by_head[software.head],
    }
    return Coefficients(**known)


def _of_stack(stack: str, fitted: Mapping[str, float]) -> dict[str, float]:
    """What runs of a stack give: nothing where there are none."""
    start = f"{stack}."
    return {n.removeprefix(start): v for n, v in fitted.items() if stack and n.startswith(start)}
