"""Predict a StepProfile for one configuration: a model's units, a strategy and a cluster."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from shardwise.predict.configurations import Configurations
from shardwise.predict.intervals import Regime, error_interval, regime_of
from shardwise.predict.kernels import check_attention, check_frozen, check_products
from shardwise.predict.memory import Memory, predict_memory, sum_terms
from shardwise.predict.program.events import PHASES, RARE_TERMS
from shardwise.predict.time import Times, predict_time
from shardwise.predict.traffic import predict_traffic
from shardwise.predict.work import MFU_CONVENTION, predict_work
from shardwise.spec.catalogue import coefficient
from shardwise.spec.cluster import ClusterSpec, DeviceSpec
from shardwise.spec.job import Job
from shardwise.spec.software import find_software
from shardwise.spec.strategy import Strategy
from shardwise.spec.version import __version__
from shardwise.step.profile import (
    Bottleneck,
    CollectiveProfile,
    MemoryProfile,
    Provenance,
    StepProfile,
    TimeProfile,
    Verdict,
    WorkProfile,
    throughput_of,
)
from shardwise.units.unit import ModelUnits

# A step that waits for the network for more than this share of its time is bound by the network.
EXPOSED_SHARE = 0.15


def price(
    units: ModelUnits, strategy: Strategy, cluster: ClusterSpec, job: Job, origin: str
) -> StepProfile:
    """Predict memory, traffic, FLOPs and time of one step of a resolved strategy.

    `origin` names where the units came from, for the profile's provenance.
    """
    grouped = units.grouped(strategy.blocks_per_unit)
    columns = Configurations.of([strategy])
    memory = predict_memory(grouped, columns, job.optimizer)
    work = predict_work(grouped, columns)
    done = WorkProfile(
        tokens=round(float(work.tokens[0])),
        model_flops=float(work.model_flops[0]),
        hardware_flops=float(work.hardware_flops[0]),
        convention=MFU_CONVENTION,
    )
    optimizer, dtype = job.optimizer, strategy.param_dtype
    check_products(cluster, strategy)
    check_frozen(cluster, units)
    check_attention(cluster, strategy)
    times = predict_time(grouped, columns, cluster, dtype, optimizer)
    # Predict again without latency, only if the step waits for the network.
    without_latency = times
    if times is not None and _waits_noticeably(times):
        without_latency = predict_time(grouped, columns, cluster, dtype, optimizer, latency=False)
    weighed = _memory_profile(memory, cluster)
    return StepProfile(
        provenance=Provenance(kind="predicted", shardwise=__version__, origin=origin),
        model=_model_description(units),
        cluster={
            "name": str(cluster),
            "device": cluster.device.name,
            "devices": cluster.devices,
            "nodes": cluster.nodes,
            # Bits per second and device, one way; absent where none is known.
            **({"network_gbps": cluster.network * 8 / 1e9} if cluster.network else {}),
        },
        job={
            "seq_len": job.seq_len,
            "optimizer": job.optimizer,
            **({"method": job.method} if job.method else {}),
        },
        strategy=strategy.model_dump(mode="json", exclude={"within_node"}),
        memory=weighed,
        traffic=traffic_of(grouped, strategy),
        work=done,
        **_time_fields(times, without_latency, done, cluster, strategy, weighed, regime_of(units)),
    )


def _model_description(units: ModelUnits) -> dict[str, Any]:
    """The model's name and number of parameters, of trained ones if it differs, and its kind."""
    described: dict[str, Any] = {"name": units.name, "parameters": units.parameters}
    if units.trained_numel != units.numel:
        described["trained_parameters"] = units.trained_numel
    if any(block.stage.experts for block in units.blocks):
        described["mixture"] = True
    return described


def traffic_of(units: ModelUnits, strategy: Strategy) -> tuple[CollectiveProfile, ...]:
    """The collectives of one rank in one step of a resolved strategy: calls and bytes."""
    columns = Configurations.of([strategy])
    return tuple(
        CollectiveProfile(
            op=collective.op,
            group=collective.group,
            group_size=int(columns.group(collective.group)[0][0]),
            calls=int(collective.calls[0]),
            bytes=int(collective.bytes[0]),
        )
        for collective in predict_traffic(units, columns)
    )


def add_traffic(
    parts: Iterable[tuple[CollectiveProfile, ...]],
) -> tuple[CollectiveProfile, ...]:
    """Calls and bytes summed over several parts of a model, by operation, group and group size."""
    totals: dict[tuple[str, str, int], CollectiveProfile] = {}
    for one in chain.from_iterable(parts):
        key = (one.op, one.group, one.group_size)
        before = totals.get(key, one._replace(calls=0, bytes=0))
        totals[key] = before._replace(
            calls=before.calls + one.calls, bytes=before.bytes + one.bytes
        )
    return tuple(totals.values())


def _time_fields(
    times: Times | None,
    without_latency: Times | None,
    work: WorkProfile,
    cluster: ClusterSpec,
    strategy: Strategy,
    memory: MemoryProfile,
    regime: Regime,
) -> dict[str, Any]:
    """Time, throughput and bottleneck of the first row, as StepProfile fields; {} if unknown."""
    if times is None or without_latency is None:
        return {}
    step = float(times.step_s[0])
    low, high = error_interval(cluster, regime)
    exposed = float(times.exposed_communication_s[0])
    peak = cluster.device.peak_flops(strategy.param_dtype)
    inside = {
        axis: float(seconds[0])
        for axis, seconds in times.inside_s.items()
        if getattr(strategy, axis) > 1
    }
    return {
        "time": TimeProfile(
            step_s=step,
            step_s_interval=(step * (1 + low), step * (1 + high)),
            compute_s=float(times.compute_s[0]),
            exposed_communication_s=exposed,
            exposed_copy_s=float(times.copy_s[0]),
            optimizer_s=float(times.optimizer_s[0]),
            inside_s=inside or None,
        ),
        "throughput": throughput_of(work, step, cluster.devices, peak),
        "bottleneck": _bottleneck(memory, times, without_latency),
    }


def _waits_noticeably(times: Times) -> bool:
    """Whether exposed communication is more than EXPOSED_SHARE of the first row's step."""
    exposed = float(times.exposed_communication_s[0])
    return exposed > EXPOSED_SHARE * float(times.step_s[0])


def _bottleneck(memory: MemoryProfile, times: Times, without_latency: Times) -> Bottleneck:
    """What limits the step: memory if it does not fit, else what takes most of its time."""
    if not memory.fits:
        return "memory"
    spent = (times.compute_s, times.exposed_communication_s, times.optimizer_s)
    if optimizer_dominates(*(float(seconds[0]) for seconds in spent)):
        return "optimizer"
    if not _waits_noticeably(times):
        return "compute"
    exposed = float(times.exposed_communication_s[0])
    # Without latency, most of the waiting for the network disappears.
    if float(without_latency.exposed_communication_s[0]) < exposed / 2:
        return "latency"
    return "bandwidth"


def optimizer_dominates(compute_s: float, exposed_s: float, optimizer_s: float) -> bool:
    """Whether the optimizer takes longer than compute, and longer than exposed communication."""
    return optimizer_s > max(compute_s, exposed_s)


def reserved_interval(
    peak_bytes: int, device: DeviceSpec, pooled: int = 0, software: str | None = None
) -> tuple[int, int]:
    """Likely range of bytes the caching allocator reserves at this peak, if it has room.

    `pooled` is bytes kept in pools of other streams. A CPU has no caching allocator, so both ends
    are the peak. Some software has a share of its own.
    """
    if device.is_cpu:
        return peak_bytes, peak_bytes
    own = find_software(software).reserved_over_pools
    low, high = own or coefficient("reserved_over_pools")
    return int((peak_bytes + pooled) * low), int((peak_bytes + pooled) * high)


def occupied_interval(peak_bytes: int, device: DeviceSpec, pooled: int = 0) -> tuple[int, int]:
    """Likely range of bytes the process occupies on the device, also outside the allocator.

    When memory is short the allocator frees unused blocks, so the low end counts only tensors.
    """
    low, high = (1.0, 1.0) if device.is_cpu else coefficient("occupied_over_pools")
    outside_low, outside_high = coefficient("outside_allocator")
    return (
        int(peak_bytes * low + outside_low * 2**30),
        int(needed_bytes(peak_bytes, device, pooled) * high + outside_high * 2**30),
    )


# ---- does it fit ------------------------------------------------------------------------------


def needed_bytes(peak_bytes: int, device: DeviceSpec, pooled: int = 0) -> int:
    """Bytes a device must have room for: tensors at the peak plus allocator overhead.

    The overhead is what the caching allocator keeps for other streams; a CPU has none.
    """
    return peak_bytes if device.is_cpu else peak_bytes + pooled


def usable_bytes(device: DeviceSpec) -> int:
    """Usable bytes of a device, which `needed_bytes` must not exceed.

    The capacity minus what the process holds outside the allocator (context, communicators),
    divided by a margin for fragmentation and prediction error (1 on CPUs); at most
    `most_tensor_bytes`.
    """
    _, outside = coefficient("outside_allocator")
    margin = 1.0 if device.is_cpu else coefficient("occupied_over_pools")[1]
    usable = (device.capacity - outside * 2**30) / margin
    return max(0, min(int(usable), most_tensor_bytes(device)))


def most_tensor_bytes(device: DeviceSpec) -> int:
    """Most bytes of tensors a device can hold, however well the allocator packs them.

    Only the least that a process holds outside the allocator is subtracted from the capacity: more
    tensors than this do not fit even at the low end of `occupied_interval`.
    """
    outside, _ = coefficient("outside_allocator")
    return max(0, int(device.capacity - outside * 2**30))


def verdict(peak_bytes: int, device: DeviceSpec, pooled: int = 0) -> Verdict:
    """Whether a peak fits: "fits" within usable bytes, "does not fit" if tensors alone are too big.

    In between it is "at risk".
    """
    if needed_bytes(peak_bytes, device, pooled) <= usable_bytes(device):
        return "fits"
    return "at risk" if peak_bytes <= most_tensor_bytes(device) else "does not fit"


def _memory_profile(memory: Memory, cluster: ClusterSpec) -> MemoryProfile:
    """The memory profile of the first row: verdict, limits, and bytes by term and by phase."""
    device = cluster.device
    terms = {
        term: round(size)
        for term, size in memory.terms_at_peak().items()
        if size or term not in RARE_TERMS
    }
    phases = {phase: round(float(sum_terms(memory.phases[phase])[0])) for phase in PHASES}
    host = round(float(memory.host_bytes[0]))
    if device.is_cpu:
        # The host's memory is the device's own.
        terms["optimizer"] += host
        phases, host = {phase: size + host for phase, size in phases.items()}, 0
    # The peak is summed from the rounded terms, so that it equals their sum exactly.
    peak = sum(terms.values())
    pooled = round(float(memory.pooled_bytes[0]))
    judged = verdict(peak, device, pooled)
    return MemoryProfile(
        fits=judged != "does not fit",
        verdict=judged,
        capacity_bytes=device.capacity,
        usable_bytes=usable_bytes(device),
        needed_bytes=needed_bytes(peak, device, pooled),
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved_interval(peak, device, pooled, cluster.software),
        occupied_bytes=occupied_interval(peak, device, pooled),
        peak_phase=memory.peak_phase(),
        terms=terms,
        phases=phases,
        host_bytes=host or None,
    )
