"""Coefficients of a device with a software stack, from measured kernels and from training runs.

Kernels give a device's rates: matrix products, attention, links. Runs give the rest: the share of a
kernel's rate that a step sustains, contention, the optimizer, the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import NamedTuple, get_args

from shardwise.predict.level import correction_factor
from shardwise.predict.rates import Coefficients, Hardware
from shardwise.spec.catalogue import device_coefficients, devices, figure, step_coefficients
from shardwise.spec.cluster import ClusterSpec, DeviceSpec
from shardwise.spec.dtype import DType, LinearDType
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
from shardwise.spec.strategy import Attention, Strategy
from shardwise.units.unit import ModelUnits

# Devices with measured kernels whose shares of the peak are used for others of a generation, the
# most similar first.
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
_HALF_RATE = (
    *("RTX-3060-12GB", "RTX-3080", "RTX-3090"),
    *("RTX-4060-Ti-16GB", "RTX-4070-Ti-SUPER", "RTX-4080", "RTX-4090"),
    *("RTX-5060-Ti-16GB", "RTX-5070-Ti", "RTX-5080", "RTX-5090"),
)
# Devices of another name with the same chip.
_SAME_KERNELS = {
    **dict.fromkeys(("A100-40GB", "A800-80GB"), "A100-80GB"),
    **dict.fromkeys(("H100-96GB-500W", "H800-SXM", "GH200"), "H100-SXM"),
    "RTX-PRO-6000": "RTX-PRO-6000-Server",
}
# Generations whose tensor cores have no 8-bit dtype, and those that scale blocks of 32 values.
_SIXTEEN_BITS: tuple[Architecture, ...] = ("volta", "ampere")
_SCALED_IN_BLOCKS: tuple[Architecture, ...] = ("blackwell", "blackwell-pcie")
_PRODUCT_KERNELS = ("library", "AITER tuned")
# Efficiency of attention's backward relative to its forward, where only the forward was measured:
# that of FlashAttention 2 and cuDNN.
_BACKWARD = 0.86
# Share of the link and seconds per hop where no collective was measured: those of NVLink 4.
_LINK, _HOP_S = 0.75, 4e-6
# Ranks of a full node, for which links are priced.
_RANKS = 8
# Share of the link and seconds per call of collectives inside blocks: between an all-gather and an
# all-reduce of 8 H100; the latency of a small NCCL collective in a node.
_EXCHANGE, _EXCHANGE_S = 0.8, 2e-5
# Tokens per expert at which grouped products take twice as long, of training kernels on B200.
_GROUPED_HALF_TOKENS = 300.0


# Bytes moved per logit when the loss reads and writes 16-bit logits in the forward and in the
# backward, minus the bytes of a cast to fp32 and the element-wise operations on that.
_LOSS_AS_IT_IS = 8.0 - 42.0


_SUSTAINED = "sustained_"


class _KernelKey(NamedTuple):
    """The properties of a device that decide which measured kernels are used for it."""

    name: str
    kind: Architecture
    nvlink: bool
    half_rate: bool = False
    p2p: bool = True

    @classmethod
    def of(cls, device: DeviceSpec) -> _KernelKey:
        name = _SAME_KERNELS.get(device.name, device.name)
        nvlink, half_rate = "NVLink" in device.link, name in _HALF_RATE
        return cls(name, architecture(device), nvlink, half_rate, device.p2p)


def coefficients_for(cluster: ClusterSpec) -> Coefficients | None:
    """Coefficients of a cluster; None for a CPU that was not calibrated.

    From the cluster's calibration, else fitted to its device, else from kernels and published runs.
    If steps were measured on the cluster, all predicted seconds are corrected by one factor.
    """
    found = _without_level(cluster)
    if found is None or cluster.level is None:
        return found
    return found._replace(level=found.level * correction_factor(cluster.level))


def hardware_of(cluster: ClusterSpec, dtype: DType) -> Hardware | None:
    """The rates of a cluster for compute in this dtype; None if peak or network is unknown."""
    peak = cluster.device.peak_flops(dtype)
    if peak is None or (cluster.nodes > 1 and cluster.network is None):
        return None
    return Hardware(
        peak_flops=peak,
        memory_bandwidth=cluster.device.memory_bandwidth,
        link_bandwidth=cluster.device.link_bandwidth,
        network_bandwidth=cluster.network or cluster.device.link_bandwidth,
        devices_per_node=cluster.devices_per_node,
        pod_nodes=cluster.pod_nodes or cluster.nodes,
        oversubscription=cluster.oversubscription,
        host_link=figure("host_link") * 1e9,
        host_memory=figure("host_memory") * 1e9,
        on_cpu=cluster.device.is_cpu,
        attention_kernels=_named_attention(cluster),
    )


def _named_attention(cluster: ClusterSpec) -> Mapping[str, Mapping[str, float]]:
    """The coefficients of the attention kernels that were measured for the cluster's device.

    Empty for CPUs and calibrated clusters, whose attention is their own.
    """
    device = cluster.device
    if cluster.calibration is not None or device.is_cpu:
        return {}
    place = _KernelKey.of(device)
    found = {}
    for attention in get_args(Attention):
        name = _kernel_of(attention, device)
        if _nearest(place, "attention", name, f"{name} prefill") is not None:
            found[attention] = _coefficients_of_attention(device, name)
    return found


def _kernel_of(attention: Attention, device: DeviceSpec) -> str:
    """The name of the measured kernel of an attention setting; for sdpa, what PyTorch calls."""
    if attention == "sdpa":
        return find_software(None).attention_on(device)
    return {"flash-2": "FA2", "flash-3": "FA3"}.get(attention, attention)


def check_attention(cluster: ClusterSpec, strategy: Strategy) -> None:
    """Raise SpecError if no measured kernel of `strategy.attention` is known for the device."""
    named = _named_attention(cluster)
    if named and strategy.attention not in (None, *named):
        raise SpecError(
            f"strategy.attention: {strategy.attention} was not measured on {cluster.device.name} "
            f"nor a similar device; known are {', '.join(named)}"
        )


def _without_level(cluster: ClusterSpec) -> Coefficients | None:
    """Coefficients of a cluster before the correction by measured steps; None if unknown."""
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
    """Coefficients of a cluster's device and software, from kernels and published runs."""
    software = find_software(cluster.software)
    return coefficients_of(cluster.device, software, step_coefficients())


class Origin(NamedTuple):
    """A kernel's figures, and whether they were measured on this device or on a similar one."""

    kernel: Kernel
    own: bool
    # The kernel's name in software; the name of its figures may add how they were measured.
    name: str


def measured_attention(device: DeviceSpec, software: Software) -> Origin:
    """The attention kernel used for a device and software.

    Measured on the device itself if possible, else on a similar device; for training if possible,
    else for inference prefill.
    """
    return _measured_attention(_KernelKey.of(device), software.attention_on(device))


@cache
def _measured_attention(place: _KernelKey, name: str) -> Origin:
    for kernel in dict.fromkeys((name, "FA2")):
        # Inference kernels were measured forward only, but may be on a more similar device.
        found = _nearest(place, "attention", kernel, f"{kernel} prefill")
        if found is not None:
            return found._replace(name=kernel)
    raise AssertionError("each generation has a measured attention kernel")


def measured_products(device: DeviceSpec) -> Origin:
    """The bf16 matrix product kernel used for a device: its own, else a similar device's."""
    return _measured_products(_KernelKey.of(device))


@cache
def _measured_products(place: _KernelKey) -> Origin:
    found = _nearest(place, "matmul", *_PRODUCT_KERNELS)
    assert found is not None, "each generation has measured products"
    return found


def _nearest(place: _KernelKey, family: Family, *names: str, dtype: str = "bf16") -> Origin | None:
    """The first of the named kernels measured on the device, else on the most similar device.

    None if no similar device has any of them in this dtype.
    """
    near = (*(_MEASURED["ampere"] if place.half_rate else ()), *_MEASURED[place.kind])
    for candidate in dict.fromkeys((place.name, *near)):
        for name in names:
            found = find_kernel(candidate, family, name, dtype)
            if found is not None:
                return Origin(found, own=candidate == place.name, name=name)
    return None


def _product_coefficients(device: DeviceSpec) -> dict[str, float]:
    """The coefficients of bf16 matrix products: efficiency, and seconds per product."""
    kernel = measured_products(device).kernel
    assert isinstance(kernel, ProductKernel)
    return {"matmul_efficiency": kernel.efficiency, "product_s": kernel.call_s}


@cache
def low_bit_products(place: _KernelKey, dtype: LinearDType) -> Mapping[str, float]:
    """Seconds of low-bit matrix products relative to 16 bits, and their cast width, by coefficient.

    Both are taken from one device that has measured both. Scales per 32 values are priced like one
    scale per tensor: no training kernel was measured for them. Empty if no similar device was
    measured.
    """
    name = "nvfp4" if dtype == "nvfp4" else "fp8"
    found = _nearest(place, "matmul", *_PRODUCT_KERNELS, dtype=name)
    if found is None or (dtype == "mxfp8" and place.kind not in _SCALED_IN_BLOCKS):
        return {}
    low = found.kernel
    wide = _measured_products(_KernelKey(low.device, place.kind, place.nvlink)).kernel
    assert isinstance(low, ProductKernel)
    assert isinstance(wide, ProductKernel)
    # Both peaks are those of the device with the low-bit kernel, if it is in the catalogue.
    own = devices().get(low.device)
    peak = (own.peak_flops("bf16") if own else None) or wide.peak
    relative = wide.efficiency * peak / (low.efficiency * low.peak)
    return {name: relative, f"{name}_cast_width": low.cast_width}


def check_products(cluster: ClusterSpec, strategy: Strategy) -> None:
    """Raise SpecError if `strategy.linear_dtype` cannot be predicted on the cluster's device."""
    dtype = strategy.linear_dtype
    if dtype is not None and not can_multiply(cluster.device, dtype):
        raise SpecError(
            f"precision: {cluster.device.name} has no products in {dtype}, or none that were "
            "measured; use --precision bf16"
        )


def check_frozen(cluster: ClusterSpec, units: ModelUnits) -> None:
    """Raise SpecError if frozen weights in fp8 would need a transposed copy on the device.

    Their backward reads them in the other order, which fp8 products of Blackwell do and those of
    Hopper do not (TransformerEngine: is_non_tn_fp8_gemm_supported).
    """
    if units.frozen_in_fp8 and architecture(cluster.device) != "blackwell":
        raise SpecError(
            f"adapter.base: fp8 is planned for B200, GB200, B300 and GB300; products of "
            f'{cluster.device.name} need a transposed copy of each weight: set base = "bf16"'
        )


def can_multiply(device: DeviceSpec, dtype: LinearDType) -> bool:
    """Whether a device has matrix products in this low-bit dtype, with measured kernels."""
    if device.is_cpu or not is_known(device):
        return False
    place = _KernelKey.of(device)
    return place.kind not in _SIXTEEN_BITS and bool(low_bit_products(place, dtype))


def _low_bits(place: _KernelKey, fitted: Mapping[str, float]) -> dict[str, float]:
    """Coefficients of low-bit matrix products in a step: kernel figures times fitted factors."""
    found: dict[str, float] = {}
    for dtype in get_args(LinearDType):
        for name, value in low_bit_products(place, dtype).items():
            factor = "low_bit_casts" if name.endswith("cast_width") else "low_bit_products"
            found[name] = value * fitted[factor]
    return found


def _attention_coefficients(device: DeviceSpec, software: Software) -> dict[str, float]:
    """The coefficients of attention: forward, backward, and heads of 64."""
    return _coefficients_of_attention(device, software.attention_on(device))


def _coefficients_of_attention(device: DeviceSpec, name: str) -> dict[str, float]:
    """The coefficients of attention with one kernel."""
    kernel = _measured_attention(_KernelKey.of(device), name).kernel
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
        "narrow_heads": kernel.head_64
        or _narrow_heads_factor(_KernelKey.of(device), kernel.kernel),
    }


@cache
def _narrow_heads_factor(place: _KernelKey, name: str) -> float:
    """Efficiency with heads of 64 relative to 128, from a similar device's kernel; 1.0 if none."""
    for candidate in _MEASURED[place.kind]:
        found = find_kernel(candidate, "attention", name, "bf16")
        if isinstance(found, AttentionKernel) and found.head_64 is not None:
            return found.head_64
    return 1.0


@cache
def _link_coefficients(place: _KernelKey) -> dict[str, float]:
    """The coefficients of the link inside a node, from a measured all-gather or a default.

    Without peer-to-peer copies, all collectives go through host memory.
    """
    if not place.p2p:
        share = figure("through_host")
        return {"link_efficiency": share, "exchange_efficiency": share, "hop_latency_s": _HOP_S}
    found = _nearest(place, "collective", "all-gather", dtype="any")
    gather = found.kernel if found and (found.own or place.nvlink) else None
    if not isinstance(gather, CollectiveKernel):
        return {"link_efficiency": _LINK, "hop_latency_s": _HOP_S}
    peers = _RANKS - 1
    share = gather.share / (1.0 + gather.half_peers / peers)
    hop_s = (gather.setup_s + gather.call_s) / peers + gather.hop_s
    return {
        "link_efficiency": share,
        "hop_latency_s": hop_s,
        **_reduce_speedup(gather.device, share),
    }


def _reduce_speedup(device: str, share: float) -> dict[str, float]:
    """The `reduce_speedup` of a device whose switches sum all-reduces; empty if not measured.

    `share` is what an all-gather gets of the link.
    """
    switch = find_kernel(device, "collective", "all-reduce in the switch", "any")
    if not isinstance(switch, CollectiveKernel):
        return {}
    ring = 2.0 * (_RANKS - 1) / _RANKS
    return {"reduce_speedup": max(1.0, switch.share * ring / (1.0 + 1.0 / _RANKS) / share)}


def coefficients_of(
    device: DeviceSpec, software: Software, fitted: Mapping[str, float]
) -> Coefficients:
    """All coefficients of a device with a software; `fitted` is values from runs, by name.

    `fitted` holds, by device generation, the share of a measured product's rate that a step
    sustains; a generation without runs gets the mean of the others. A value that is valid for one
    stack only is named "stack.name".
    """
    shares = {name: value for name, value in fitted.items() if name.startswith(_SUSTAINED)}
    mean = sum(shares.values()) / len(shares)
    sustained = shares.get(_SUSTAINED + architecture(device), mean)
    shared = {name: value for name, value in fitted.items() if name in Coefficients._fields}
    own = _stack_coefficients(software.stack, fitted)
    by_head = {
        "plain": 0.0,
        "16-bit loss": _LOSS_AS_IT_IS,
        "vocabulary chunks": fitted["head_bytes"],
    }
    products, attention = _product_coefficients(device), _attention_coefficients(device, software)
    attention["attention_efficiency"] *= own.pop("attention_factor", 1.0)
    known = {
        "matmul_half_s": 0.0,
        "grouped_half_tokens": _GROUPED_HALF_TOKENS,
        "exchange_efficiency": _EXCHANGE,
        "exchange_latency_s": _EXCHANGE_S,
        "library_routed_s": figure("library_routed_s"),
        **products,
        **attention,
        **_link_coefficients(_KernelKey.of(device)),
        **_low_bits(_KernelKey.of(device), fitted),
        **shared,
        **own,
        "matmul_efficiency": products["matmul_efficiency"] * sustained,
        "head_bytes": by_head[software.head],
    }
    return Coefficients(**known)


def _stack_coefficients(stack: str, fitted: Mapping[str, float]) -> dict[str, float]:
    """The fitted values named "stack.name", by name; empty for a stack without runs."""
    start = f"{stack}."
    return {n.removeprefix(start): v for n, v in fitted.items() if stack and n.startswith(start)}
