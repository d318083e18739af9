"""One configuration, priced: units, strategy and cluster become a StepProfile."""

from __future__ import annotations

from shardwise.predict.choreography import sum_terms
from shardwise.predict.configurations import Configurations
from shardwise.predict.memory import PHASES, Memory, predict_memory
from shardwise.predict.traffic import predict_traffic
from shardwise.predict.work import MFU_CONVENTION, predict_work
from shardwise.spec.catalogue import coefficient
from shardwise.spec.cluster import ClusterSpec, DeviceSpec
from shardwise.spec.job import OPTIMIZER_STATES, Job
from shardwise.spec.strategy import Strategy
from shardwise.step import (
    CollectiveProfile,
    MemoryProfile,
    Provenance,
    StepProfile,
    Verdict,
    WorkProfile,
)
from shardwise.units.unit import ModelUnits
from shardwise.version import __version__


def price(
    units: ModelUnits, strategy: Strategy, cluster: ClusterSpec, job: Job, origin: str
) -> StepProfile:
    """Predict one step of a resolved strategy."""
    grouped = units.grouped(strategy.blocks_per_unit)
    columns = Configurations.of([strategy])
    memory = predict_memory(grouped, columns, OPTIMIZER_STATES[job.optimizer])
    work = predict_work(grouped, columns)
    sizes = {
        "shard": strategy.shard or 1,
        "replicate": strategy.replicate or 1,
        "reshard": int(columns.reshard_group[0]) or 1,
    }
    return StepProfile(
        provenance=Provenance(kind="predicted", shardwise=__version__, origin=origin),
        model={"name": units.name, "parameters": units.numel},
        cluster={
            "name": str(cluster),
            "device": cluster.device.name,
            "devices": cluster.devices,
            "nodes": cluster.nodes,
        },
        job={"seq_len": job.seq_len, "optimizer": job.optimizer},
        strategy=strategy.model_dump(mode="json", exclude={"within_node"}),
        memory=_memory_profile(memory, cluster.device),
        traffic=tuple(
            CollectiveProfile(
                op=collective.op,
                group=collective.group,
                group_size=sizes[collective.group],
                calls=int(collective.calls[0]),
                bytes=int(collective.bytes[0]),
            )
            for collective in predict_traffic(grouped, columns)
        ),
        work=WorkProfile(
            tokens=round(float(work.tokens[0])),
            model_flops=float(work.model_flops[0]),
            hardware_flops=float(work.hardware_flops[0]),
            convention=MFU_CONVENTION,
        ),
    )


def reserved_interval(peak_bytes: int, device: DeviceSpec) -> tuple[int, int]:
    """What the allocator is likely to hold at that peak; a CPU has no caching allocator."""
    if device.is_cpu:
        return peak_bytes, peak_bytes
    low, high = coefficient("reserved_over_allocated")
    return int(peak_bytes * low), int(peak_bytes * high)


def occupied_interval(peak_bytes: int, device: DeviceSpec) -> tuple[int, int]:
    """What the process takes of the device: the reserve, and what lies outside the allocator."""
    low, high = reserved_interval(peak_bytes, device)
    outside_low, outside_high = coefficient("outside_allocator")
    return low + int(outside_low * 2**30), high + int(outside_high * 2**30)


def verdict(peak_bytes: int, device: DeviceSpec) -> Verdict:
    """Compare both ends of the interval with what the device can give."""
    low, high = occupied_interval(peak_bytes, device)
    if low > device.capacity:
        return "does not fit"
    return "at risk" if high > device.capacity else "fits"


def _memory_profile(memory: Memory, device: DeviceSpec) -> MemoryProfile:
    terms = {term: round(size) for term, size in memory.terms_at_peak().items()}
    # Rounding each term keeps the sum exact by definition: the peak is the sum of the terms.
    peak = sum(terms.values())
    judged = verdict(peak, device)
    host = round(float(memory.host_bytes[0]))
    return MemoryProfile(
        fits=judged != "does not fit",
        verdict=judged,
        capacity_bytes=device.capacity,
        peak_allocated_bytes=peak,
        peak_reserved_bytes=reserved_interval(peak, device),
        occupied_bytes=occupied_interval(peak, device),
        peak_phase=memory.peak_phase(),
        terms=terms,
        phases={phase: round(float(sum_terms(memory.phases[phase])[0])) for phase in PHASES},
        host_bytes=host or None,
    )
