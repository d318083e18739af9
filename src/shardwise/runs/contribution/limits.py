"""Bounds that hold for every device: its compute, memory and links, and the time of a step.

They are generous: a slow machine and a fast one pass, a value in another unit does not.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.runs.contribution.record import Contribution, Hardware
from shardwise.spec import catalogue
from shardwise.spec.dtype import DType
from shardwise.spec.quantity import show_gib, show_seconds

# No step of training is shorter: starting its kernels alone takes longer.
SHORTEST_STEP_S = 1e-5
# Seconds of a step besides its computation: Python, a data loader, a collective that waits.
OVERHEAD_S = 1.0
# Below this share of the peak, a step time is more likely in another unit.
LEAST_MFU = 1e-5
# FLOP/s of one core. The matrix unit of a server core reaches 6e12 in bf16, that of a laptop some
# 2e12 in fp32. A core that trains does not stay below 0.1 FLOP per cycle.
FASTEST_CORE, SLOWEST_CORE = 1e13, 1e8
# Assumed cores of a node that does not state them.
MOST_CORES = 1024
# Measured over predicted step time. Milliseconds for seconds are a factor of 1000; predictions
# without host overhead, on a machine in trouble, have been wrong by some tens.
MOST_SLOWDOWN, MOST_SPEEDUP = 300, 100
# Drivers report totals that differ by 1 or 2 %.
MEMORY_TOLERANCE = 0.05
# Factor by which a device outside of the catalogue may exceed the best one in it.
UNKNOWN_DEVICE = 10
# Bytes of the main memory of one machine.
MOST_HOST_MEMORY = 2**47
# Largest predicted peak over the memory of the device, for a run that did fit.
MOST_PREDICTED = 10
LONGEST_RUN_S = 366 * 86_400


def duration_problems(one: Contribution) -> Iterator[str]:
    """Yield a problem if the run took longer than a year."""
    time = one.measured.time
    if time is not None and one.steps * time.step_s > LONGEST_RUN_S:
        yield f"steps: {one.steps:,} steps of {show_seconds(time.step_s)} take more than a year"


def device_memory(one: Contribution) -> Iterator[str]:
    """Yield a problem if the device's memory is not that of the catalogue, or far too small."""
    hardware = one.hardware
    known = None if hardware.is_cpu else catalogue.devices().get(hardware.device or "")
    if known is not None:
        low = (1 - MEMORY_TOLERANCE) * min(known.capacity, known.memory)
        high = (1 + MEMORY_TOLERANCE) * known.memory
    elif hardware.is_cpu:
        low, high = 0, MOST_HOST_MEMORY
    else:
        low, high = 0, UNKNOWN_DEVICE * max(each.memory for each in catalogue.devices().values())
    if not low <= hardware.memory_bytes <= high:
        has = show_gib(known.capacity if known else high)
        yield (
            f"hardware.memory_bytes: {show_gib(hardware.memory_bytes)}, but {hardware.label} has "
            f"{has}{'' if known else ' at most'}"
        )
    predicted = one.predicted.memory
    if predicted and predicted.peak_allocated_bytes > MOST_PREDICTED * hardware.memory_bytes:
        yield (
            f"predicted.memory.peak_allocated_bytes: {show_gib(predicted.peak_allocated_bytes)} "
            f"would not have run in {show_gib(hardware.memory_bytes)}; is it in bytes?"
        )


def step_times(one: Contribution, model_flops: float | None) -> Iterator[str]:
    """Yield each step time that the devices cannot have, or that is far from the other one.

    `model_flops` are the FLOPs of a step; None takes those that the step states.
    """
    wrong = False
    for name, step in (("predicted", one.predicted), ("measured", one.measured)):
        if step.time is None:
            continue
        flops = model_flops or (step.work.model_flops if step.work else None)
        problem = _step_time(one, step.time.step_s, flops)
        if problem:
            wrong = True
            yield f"{name}.time.step_s: {show_seconds(step.time.step_s)} {problem}"
    predicted, measured = one.predicted.time, one.measured.time
    if wrong or predicted is None or measured is None:
        return
    slower = (measured.step_s - OVERHEAD_S) / predicted.step_s
    faster = predicted.step_s / measured.step_s
    if slower > MOST_SLOWDOWN or faster > MOST_SPEEDUP:
        yield (
            f"measured.time.step_s: {show_seconds(measured.step_s)} is too far from the predicted "
            f"{show_seconds(predicted.step_s)}; is it seconds?"
        )


def _step_time(one: Contribution, step_s: float, flops: float | None) -> str:
    """The problem of one step time, as the end of a sentence; empty if there is none."""
    if step_s < SHORTEST_STEP_S:
        return "is shorter than any step; is it seconds?"
    if flops is None:
        return ""
    low, high = _possible_s(one, flops)
    if step_s < low and one.hardware.is_cpu:
        return f"is {low / step_s:.3g} times faster than the cores can compute it"
    if step_s < low:
        return f"implies an MFU of {low / step_s:.2f}, more than the peak"
    return "is too slow for what it computes; is it seconds?" if step_s > high else ""


def _possible_s(one: Contribution, model_flops: float) -> tuple[float, float]:
    """Seconds of the shortest and of the longest possible step with these FLOPs."""
    hardware, host = one.hardware, one.host
    if hardware.is_cpu:
        cores = hardware.nodes * (host.cores or MOST_CORES)
        fastest, slowest = cores * FASTEST_CORE, hardware.devices * SLOWEST_CORE
    else:
        fastest = hardware.devices * peak_flops(hardware, one.strategy.param_dtype)
        slowest = LEAST_MFU * fastest
    return model_flops / fastest, OVERHEAD_S + model_flops / slowest


def peak_flops(hardware: Hardware, dtype: DType) -> float:
    """FLOP per second of one device: the catalogue's peak, if it has the device and the dtype.

    Otherwise the stated peak, within bounds.
    """
    known = catalogue.devices().get(hardware.device or "")
    if known is not None and dtype in known.peak:
        return float(known.peak[dtype])
    devices = catalogue.devices().values()
    most = UNKNOWN_DEVICE * max(peak for each in devices for peak in each.peak.values())
    return float(min(hardware.peak_flops.get(dtype, most), most))


def fastest_link(hardware: Hardware) -> float:
    """Bytes per second of the fastest stated link of a device, within bounds."""
    most = UNKNOWN_DEVICE * max(each.link_bandwidth for each in catalogue.devices().values())
    return min(most, max(hardware.link_bytes_per_s, hardware.network_bytes_per_s or 0.0))
