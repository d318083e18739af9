"""Find impossible numbers in a contribution, and describe each in a sentence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from shardwise.predict.work import model_flops_per_token
from shardwise.runs.contribution.limits import (
    device_memory,
    duration_problems,
    fastest_link,
    peak_flops,
    step_times,
)
from shardwise.runs.contribution.record import Contribution, MemoryTerm, Step
from shardwise.spec.quantity import show_gib
from shardwise.spec.record import SpecError
from shardwise.spec.version import __version__
from shardwise.step.profile import CollectiveProfile, StepProfile, throughput_of
from shardwise.units.decoder import decoder_units
from shardwise.units.load import load_units

# A measured peak below this share of the resident model states is in another unit.
LEAST_RESIDENT = 0.5
# Largest relative difference of two values that follow from each other.
ROUNDING = 0.01
# Largest relative difference of a step's FLOPs. Releases may count norms and softmax in another
# way, a few percent of matmuls.
FLOPS_TOLERANCE = 0.1
# Largest hardware over model FLOPs. Recompute repeats the forward, which is at most half of a step,
# if its weights are frozen.
MOST_RECOMPUTED = 2.0
# Largest sequence length over rotary positions, which can be stretched: 4,096 to a million is 256.
MOST_STRETCHED = 1000
_RELEASE = re.compile(r"[0-9]+(\.[0-9]+)*")


def impossible_numbers(one: Contribution) -> list[str]:
    """A sentence for each number that contradicts physics or another number of the record."""
    checks: tuple[Callable[[Contribution], Iterator[str]], ...] = (
        _layout, _versions, _positions, _parameters, _device, _tokens, _work, device_memory,
        _memory, duration_problems, _times, _rates, _links,
    )  # fmt: skip
    try:
        return [problem for check in checks for problem in check(one)]
    except SpecError as error:
        # A run that no formula can describe is impossible.
        return error.problems
    except (ArithmeticError, ValueError) as error:
        return [f"its numbers cannot be computed with ({type(error).__name__}); check the shapes"]


def _steps(one: Contribution) -> tuple[tuple[str, Step], ...]:
    """The predicted and the measured step, each with its name."""
    return ("predicted", one.predicted), ("measured", one.measured)


def _layout(one: Contribution) -> Iterator[str]:
    """Yield each contradiction between the strategy, its groups and the number of devices."""
    devices = one.hardware.devices
    try:
        resolved = one.strategy.resolve(devices, one.hardware.devices_per_node)
    except SpecError as error:
        yield error.problems[0]
        return
    if resolved.devices != devices:
        yield f"strategy: is for {resolved.devices} devices, but hardware has {devices}"
    for name, step in _steps(one):
        for each in step.traffic:
            if devices % each.group_size:
                yield f"{name}.traffic: groups of {each.group_size} do not divide {devices} devices"


def _versions(one: Contribution) -> Iterator[str]:
    """Yield each version newer than this release, whose fields may mean other things."""
    said = {f"{name}.shardwise": step.shardwise for name, step in _steps(one)}
    if "shardwise" in one.host.versions:
        said["host.versions.shardwise"] = one.host.versions["shardwise"]
    for where, version in said.items():
        if _release(version) > _release(__version__):
            yield f"{where}: {version}, but this is {__version__}; check with the newest Shardwise"


def _release(version: str) -> list[int]:
    """The numbers of a release, such as [1, 2] for 1.2.0, without zeros at the end."""
    found = _RELEASE.match(version)
    numbers = [int(part) for part in found[0].split(".")] if found else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return numbers


def _positions(one: Contribution) -> Iterator[str]:
    """Yield a problem if the sequences are far longer than the model's positions."""
    if one.model is None:
        return
    stretch = 1 if one.model.positions == "learned" else MOST_STRETCHED
    if one.job.seq_len > stretch * one.model.max_positions:
        yield (
            f"job.seq_len: {one.job.seq_len:,} is far beyond the {one.model.max_positions:,} "
            "positions of the model"
        )


def _parameters(one: Contribution) -> Iterator[str]:
    """Yield a problem if the parameters are not those of the shapes."""
    spec = one.model_spec()
    if spec is None or spec.adapter is not None:
        return
    known = decoder_units(spec, min(one.job.seq_len, spec.max_positions)).numel
    if known != one.parameters:
        yield f"parameters: {one.parameters:,}, but the shapes have {known:,}"


def _device(one: Contribution) -> Iterator[str]:
    """Yield a problem if the devices reported another name, or no step time was measured."""
    if one.hardware.reported is False:
        yield f"hardware.device: is {one.hardware.label}, but the devices reported another name"
    if one.measured.time is None:
        yield "measured.time: is missing; a contribution is a measured step"


def _tokens(one: Contribution) -> Iterator[str]:
    """Yield each step with more tokens than its batch can hold."""
    most = one.job.tokens_per_step(one.strategy)
    for name, step in _steps(one):
        if step.work is not None and step.work.tokens > most:
            yield (
                f"{name}.work.tokens: {step.work.tokens:,}, but sequence length, micro-batch, "
                f"accumulation and data parallelism make {most:,}"
            )


def _model_flops(one: Contribution) -> float | None:
    """Model FLOPs of a step on all devices, computed from the shapes.

    None if the shapes do not describe all of the model.
    """
    spec = one.model_spec()
    if spec is None:
        return None
    units = load_units(spec, one.job.seq_len, one.strategy)
    return model_flops_per_token(units) * one.job.tokens_per_step(one.strategy)


def _work(one: Contribution) -> Iterator[str]:
    """Yield each problem of FLOPs and step times.

    FLOPs are compared with those of the shapes or, for a traced model, of the prediction. They
    include padding, which is computed though its tokens do not count.
    """
    known, source = _model_flops(one), "the shapes"
    if known is None and one.predicted.work is not None:
        known, source = one.predicted.work.model_flops, "the prediction"
    for name, step in _steps(one):
        work = step.work
        if work is None:
            continue
        if known is not None and abs(work.model_flops / known - 1) > FLOPS_TOLERANCE:
            yield (
                f"{name}.work.model_flops: {work.model_flops:.4g}, but {source} "
                f"{'make' if source == 'the shapes' else 'has'} {known:.4g}"
            )
        again = work.hardware_flops / work.model_flops
        if not 1 - ROUNDING <= again <= MOST_RECOMPUTED:
            yield f"{name}.work.hardware_flops: are {again:.3g} times model_flops, not 1 to 2 times"
    yield from step_times(one, known)


def _memory(one: Contribution) -> Iterator[str]:
    """Yield each problem of memory: its terms, and a peak that is too large or too small."""
    for name, step in _steps(one):
        memory = step.memory
        if memory is not None and sum(memory.terms.values()) != memory.peak_allocated_bytes:
            yield f"{name}.memory.terms: do not sum to peak_allocated_bytes"
    measured, predicted = one.measured.memory, one.predicted.memory
    if measured is None:
        return
    reserved = measured.peak_reserved_bytes or (0, 0)
    taken = max(measured.peak_allocated_bytes, *reserved)
    if taken > one.hardware.memory_bytes:
        yield (
            f"measured.memory: {show_gib(taken)} are more than the "
            f"{show_gib(one.hardware.memory_bytes)} of {one.hardware.label}"
        )
    # Only model states are in memory all the time.
    states: tuple[MemoryTerm, ...] = ("parameters", "optimizer")
    resident = sum(predicted.terms.get(term, 0) for term in states) if predicted else 0
    if not one.strategy.offload and measured.peak_allocated_bytes < LEAST_RESIDENT * resident:
        yield (
            f"measured.memory.peak_allocated_bytes: {measured.peak_allocated_bytes:,} is less than "
            f"half of the model states ({resident:,} bytes); is it in bytes?"
        )


def _times(one: Contribution) -> Iterator[str]:
    """Yield each step time outside of its interval, or shorter than its parts."""
    for name, step in _steps(one):
        time = step.time
        if time is None:
            continue
        for field in ("step_s_interval", "step_s_spread"):
            ends = getattr(time, field)
            if ends is not None and not ends[0] <= time.step_s <= ends[1]:
                yield f"{name}.time.{field}: step_s does not lie in it"
        parts = (time.compute_s or 0.0) + (time.exposed_communication_s or 0.0)
        if parts > time.step_s * (1 + ROUNDING):
            yield f"{name}.time: compute and exposed communication are longer than the step"


def _rates(one: Contribution) -> Iterator[str]:
    """Yield each rate (tokens per second, MFU, HFU) that does not follow from the step time.

    Also a stated peak beyond the device's. The peak of a CPU is not known.
    """
    dtype = one.strategy.param_dtype
    peak = None if one.hardware.is_cpu else one.hardware.peak_flops.get(dtype)
    if peak is not None and peak > (1 + ROUNDING) * peak_flops(one.hardware, dtype):
        yield f"hardware.peak_flops.{dtype}: {peak:.3g} is more than {one.hardware.label} has"
    profiles: dict[str, StepProfile] = dict(
        zip(("predicted", "measured"), one.profiles(), strict=True)
    )
    for name, step in _steps(one):
        work = profiles[name].work
        if step.time is None or work is None:
            continue
        found = throughput_of(work, step.time.step_s, one.hardware.devices, peak)
        stated = step.throughput
        for field in ("tokens_per_s", "tokens_per_s_per_device", "mfu", "hfu"):
            said, computed = getattr(stated, field, None), getattr(found, field)
            if said and computed and abs(said / computed - 1) > ROUNDING:
                yield f"{name}.throughput.{field}: {said:.4g}, but step_s implies {computed:.4g}"


def _links(one: Contribution) -> Iterator[str]:
    """Yield a problem if a device sends more bytes per second than its fastest link can carry."""
    hardware, time = one.hardware, one.measured.time
    if hardware.is_cpu or time is None:
        return
    sent = sum(CollectiveProfile(**each.model_dump()).sent_bytes for each in one.measured.traffic)
    fastest = fastest_link(hardware)
    if sent / time.step_s > fastest:
        yield (
            f"measured.traffic: {sent / time.step_s / 1e9:,.0f} GB/s per device are more than its "
            f"links have ({fastest / 1e9:,.0f} GB/s)"
        )
