"""Convert the measurements of a machine to a calibrated ClusterSpec."""

from __future__ import annotations

import re

from shardwise.spec.calibration import Calibration
from shardwise.spec.catalogue import coefficient
from shardwise.spec.cluster import ClusterSpec, DeviceSpec
from shardwise.spec.dtype import DType
from shardwise.trials.calibrate.fit import CPU
from shardwise.trials.calibrate.machine.collectives import Collective, GroupPlace, Operation
from shardwise.trials.calibrate.machine.compute import DTYPES
from shardwise.trials.calibrate.machine.line import Line, fit_line
from shardwise.trials.calibrate.machine.measure import Machine

# Matrix products in one pass through a transformer block: four of attention, three of the MLP.
PRODUCTS_PER_PASS = 7
MEASURED = "measured by shardwise calibrate"
# Bytes per second: slower than any link, for a device that has none.
NO_LINK = 1e9
# Largest ratios of an all-to-all to an all-gather that a calibration takes, of bandwidths and of
# latencies. An all-gather whose latency is next to nothing says nothing about another's.
MAX_SPEEDUP, MAX_LATENCY = 10.0, 1000.0


def to_cluster(
    machine: Machine, device: DeviceSpec | None = None, network: float | None = None
) -> ClusterSpec:
    """The calibrated cluster of a measured machine.

    Coefficients are shares of the data sheet `device`; None takes measured rates as the data sheet.
    `network` is the nominal bandwidth between nodes in bytes per second per device; None takes the
    measured one.
    """
    inside = find(machine, "all_gather", "inside a node")
    across = find(machine, "all_gather", "all")
    spec = device or as_device(machine)
    # A ring's traffic leaves a node once, over the links of all devices in it.
    reached = across.line.rate / machine.devices_per_node if across else None
    network = network or (rounded(reached) if reached else None)
    found = {
        **_compute(machine, spec),
        **_links(machine, spec, inside, across),
        "network_efficiency": reached / network if reached and network else 1.0,
        "reduce_speedup": _reduce_speedup(machine, inside),
        **_all_to_alls(machine, reached),
        "contention": CPU.contention if machine.contention is None else machine.contention,
        "overhead_s": CPU.overhead_s if spec.is_cpu else 0.0,
        "hook_s": CPU.hook_s if spec.is_cpu else 0.0,
        "exchange_latency_s": _exchange_latency(machine),
    }
    calibration = Calibration.read(
        {
            **{name: rounded(value) for name, value in found.items()},
            "interval": coefficient("step-interval-other"),
            "source": _source(machine),
        },
        where="calibrate",
    )
    return ClusterSpec(
        device=spec,
        nodes=machine.nodes,
        devices_per_node=machine.devices_per_node,
        network=network,
        calibration=calibration,
    )


def as_device(machine: Machine) -> DeviceSpec:
    """A data sheet whose peaks and bandwidths are the measured rates."""
    inside = find(machine, "all_gather", "inside a node")
    name = re.sub(r"[^A-Za-z0-9]+", "-", machine.device).strip("-")
    return DeviceSpec(
        name=name,
        title=machine.device,
        memory=machine.memory,
        memory_bandwidth=rounded(machine.compute.copy_rate),
        link="" if inside is None else machine.backend,
        link_bandwidth=rounded(inside.line.rate) if inside else NO_LINK,
        node_size=machine.devices_per_node,
        peak={dtype: rounded(product_line(machine, dtype).rate) for dtype in DTYPES},
        source={
            "memory": "as the system reports it",
            "memory_bandwidth": f"{MEASURED}, a copy",
            "link_bandwidth": f"{MEASURED}, all-gather" if inside else "none: one process",
            "peak": f"{MEASURED}, square products; shares of it are no MFU of a data sheet",
        },
    )


def rounded(value: float) -> float:
    """The value rounded to four digits, which is the best precision of a measurement."""
    return float(f"{value:.4g}")


def product_line(machine: Machine, dtype: DType) -> Line:
    """The line through the seconds of matrix products by their FLOPs.

    Each size has eight times the FLOPs of the one before, so sizes from 1/100 of the largest count.
    """
    mine = [one for one in machine.compute.products if one.dtype == dtype]
    return fit_line([(one.flops, one.timing.usual) for one in mine], large_from=1 / 100)


def find(machine: Machine, operation: Operation, place: GroupPlace) -> Collective | None:
    """The measurement of an operation in a kind of group; None if there is none."""
    found = [one for one in machine.collectives if (one.operation, one.place) == (operation, place)]
    return found[0] if found else None


def _compute(machine: Machine, spec: DeviceSpec) -> dict[str, float]:
    """Coefficients of compute by name, relative to the data sheet `spec`."""
    compute = machine.compute
    dtype: DType = "fp32" if spec.is_cpu else "bf16"
    line = product_line(machine, dtype)
    peak = spec.peak_flops(dtype) or line.rate
    efficiency = line.rate / peak
    return {
        "matmul_efficiency": efficiency,
        "matmul_half_s": PRODUCTS_PER_PASS * line.fixed_s * efficiency,
        "attention_efficiency": compute.attention_rate / peak,
        "elementwise_factor": spec.memory_bandwidth / compute.elementwise_rate,
        "launch_s": compute.launch_s,
        "optimizer_factor": spec.memory_bandwidth / compute.optimizer_rate,
    }


def _links(
    machine: Machine, spec: DeviceSpec, inside: Collective | None, across: Collective | None
) -> dict[str, float]:
    """Coefficients of links by name: efficiency, and latencies in seconds."""
    hop = inside.line.fixed_s / (inside.members - 1) if inside else 0.0
    between = find(machine, "all_gather", "between nodes")
    rest = across.line.fixed_s - hop * (machine.devices_per_node - 1) if across else 0.0
    alone = between.line.fixed_s if between else max(0.0, rest)
    return {
        "link_efficiency": inside.line.rate / spec.link_bandwidth if inside else 1.0,
        "hop_latency_s": hop,
        "network_latency_s": alone / max(1, machine.nodes - 1),
    }


def _exchange_latency(machine: Machine) -> float:
    """Seconds that a collective inside a block takes beyond the collective; 0 if unmeasured."""
    if machine.exchange_s is None:
        return 0.0
    place = machine.collectives[0].place
    asked: tuple[Operation, ...] = ("all_gather", "reduce_scatter")
    found = (find(machine, operation, place) for operation in asked)
    alone = [one.line.fixed_s for one in found if one]
    return max(0.0, machine.exchange_s - sum(alone) / len(alone))


def _reduce_speedup(machine: Machine, inside: Collective | None) -> float:
    """Rate of an all-reduce over that of an all-gather inside a node; 1 if not measured."""
    reduced = find(machine, "all_reduce", "inside a node")
    return reduced.line.rate / inside.line.rate if reduced and inside else 1.0


def _all_to_alls(machine: Machine, reached: float | None) -> dict[str, float]:
    """Bandwidth and latency of all-to-alls relative to all-gathers, by coefficient; if measured.

    `reached` is the bandwidth between nodes per device of an all-gather, in bytes per second.
    """
    found = {}
    gather = find(machine, "all_gather", "inside a node")
    exchange = find(machine, "all_to_all", "inside a node")
    if gather and exchange:
        found["all_to_all_speedup"] = min(MAX_SPEEDUP, exchange.line.rate / gather.line.rate)
        found["all_to_all_latency"] = _relative_latency(exchange, gather)
    gather = find(machine, "all_gather", "between nodes")
    exchange = find(machine, "all_to_all", "between nodes")
    if gather and exchange and reached:
        # The groups between nodes work at once, so that this is the bandwidth of one device.
        found["all_to_all_network_speedup"] = min(MAX_SPEEDUP, exchange.line.rate / reached)
        found["all_to_all_network_latency"] = _relative_latency(exchange, gather)
    return found


def _relative_latency(one: Collective, other: Collective) -> float:
    """The latency of `one` over that of `other` in the same group; 1 if the other has none."""
    if not other.line.fixed_s:
        return 1.0
    return min(MAX_LATENCY, one.line.fixed_s / other.line.fixed_s)


def _source(machine: Machine) -> str:
    """The source of the calibration in words: devices, backend and torch's version."""
    import torch

    where = f"{machine.nodes} x {machine.devices_per_node} {machine.device}"
    through = f" over {machine.backend}" if machine.backend else ""
    return f"{MEASURED} on {where}{through}, torch {torch.__version__}"
