"""StepProfile: memory, traffic and time of one optimizer step, predicted or measured.

A value that is not known is absent, never zero: fields left at None do not appear in the JSON.
Everything is per device unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from shardwise.spec.mesh import INNER_AXES, OWN_GROUPS, InnerAxis
from shardwise.spec.quantity import show_count, show_gib, show_seconds
from shardwise.spec.read_file import read_json
from shardwise.spec.record import SpecError
from shardwise.spec.wording import value_sentence
from shardwise.step.notebook import html_of

SCHEMA = 1

# The mesh axis of a group that has another name.
_AXIS = {"reshard": "shard"}

Verdict = Literal["fits", "at risk", "does not fit"]
Bottleneck = Literal["memory", "bandwidth", "latency", "compute", "optimizer"]


class Provenance(NamedTuple):
    """How the numbers were obtained: kind, version of Shardwise, and source."""

    kind: Literal["predicted", "simulated", "measured"]
    shardwise: str
    origin: str


class MemoryProfile(NamedTuple):
    """Memory of the fullest device. `terms` are the bytes at the peak by term, and sum to it."""

    peak_allocated_bytes: int
    terms: Mapping[str, int]
    fits: bool | None = None
    verdict: Verdict | None = None
    capacity_bytes: int | None = None
    peak_reserved_bytes: tuple[int, int] | None = None
    # Bytes the process occupies, with those outside the allocator: from, to.
    occupied_bytes: tuple[int, int] | None = None
    peak_phase: str | None = None
    phases: Mapping[str, int] | None = None
    host_bytes: int | None = None
    # Tensors at the peak plus allocator overhead; a step fits if this is at most the usable bytes.
    needed_bytes: int | None = None
    usable_bytes: int | None = None


class CollectiveProfile(NamedTuple):
    """One kind of collective in a step: `bytes` is the full group's message, summed over calls."""

    op: str
    group: str
    group_size: int
    calls: int
    bytes: int

    @property
    def sent_bytes(self) -> float:
        """Bytes a rank sends in a bandwidth-optimal (ring) algorithm, summed over calls."""
        factor = 2.0 if self.op == "all_reduce" else 1.0
        return factor * (self.group_size - 1) / self.group_size * self.bytes


class WorkProfile(NamedTuple):
    """Tokens and FLOPs of one step over all devices."""

    tokens: int
    model_flops: float
    hardware_flops: float
    convention: str


class TimeProfile(NamedTuple):
    """Seconds of one step. Compute, exposed communication, exposed copies and optimizer sum to it.

    A prediction has an interval that contains nine of ten runs; a measurement has a spread, the
    10th and 90th percentile of its steps.
    """

    step_s: float
    step_s_interval: tuple[float, float] | None = None
    step_s_spread: tuple[float, float] | None = None
    compute_s: float | None = None
    exposed_communication_s: float | None = None
    exposed_copy_s: float | None = None
    optimizer_s: float | None = None
    # Parts of the exposed communication: collectives inside blocks, by axis. In JSON each axis has
    # a key of its own, such as tensor_s.
    inside_s: Mapping[InnerAxis, float] | None = None


class ThroughputProfile(NamedTuple):
    """Tokens per second over all devices and per device, MFU and HFU."""

    tokens_per_s: float
    tokens_per_s_per_device: float
    mfu: float | None = None
    hfu: float | None = None
    mfu_convention: str | None = None


class PartProfile(NamedTuple):
    """Some consecutive devices of a step in which devices, or their shares of it, differ.

    `step_s` is what their micro-batches, the common collectives and the optimizer take; they wait
    for the other parts for the rest of the step.
    """

    device: str
    devices: int
    # Micro-batches of each device in a step.
    accumulate: int
    memory: MemoryProfile
    step_s: float | None = None
    waiting_s: float | None = None


class StepProfile(NamedTuple):
    """One optimizer step, predicted, simulated or measured."""

    provenance: Provenance
    model: Mapping[str, Any]
    cluster: Mapping[str, Any]
    job: Mapping[str, Any]
    strategy: Mapping[str, Any]
    # None if memory was not measured.
    memory: MemoryProfile | None
    traffic: tuple[CollectiveProfile, ...]
    work: WorkProfile | None = None
    time: TimeProfile | None = None
    throughput: ThroughputProfile | None = None
    bottleneck: Bottleneck | None = None
    # Where devices or their shares differ, each part, by rank; the slowest decides the step, and
    # `memory` is of the part with the least room.
    parts: tuple[PartProfile, ...] | None = None

    @property
    def known_memory(self) -> MemoryProfile:
        """The memory profile; only for profiles that have one, as every prediction does."""
        assert self.memory is not None
        return self.memory

    def __repr__(self) -> str:
        where = self.cluster.get("name") or f"{self.cluster.get('devices')} devices"
        known = [f"{self.model.get('name')} on {where}", str(self.strategy.get("kind"))]
        if self.memory is not None:
            peak = f"peak {show_gib(self.memory.peak_allocated_bytes)}"
            known.append(f"{peak} ({self.memory.verdict})" if self.memory.verdict else peak)
        if self.time is not None:
            known.append(f"step {show_seconds(self.time.step_s)}")
        if self.throughput is not None:
            known.append(f"{show_count(self.throughput.tokens_per_s)} tokens/s")
        return f"StepProfile({self.provenance.kind}: {', '.join(known)})"

    def _repr_html_(self) -> str:
        return html_of(self)

    def to_dict(self) -> dict[str, Any]:
        """The profile as `--json` prints it."""
        plain: dict[str, Any] = {"schema": SCHEMA, **_plain(self)}
        if self.time is not None:
            plain["time"] = without_inside(self.time)
        plain["provenance"]["from"] = plain["provenance"].pop("origin")
        return plain


def without_inside(time: TimeProfile) -> dict[str, Any]:
    """The time as JSON has it, with a key for each axis inside blocks."""
    plain: dict[str, Any] = _plain(time)
    inside = plain.pop("inside_s", {})
    return {**plain, **{f"{axis}_s": seconds for axis, seconds in inside.items()}}


def with_inside(time: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a TimeProfile, from keys as JSON has them: one for each axis inside blocks."""
    given = {axis: time.get(f"{axis}_s") for axis in INNER_AXES}
    inside = {axis: seconds for axis, seconds in given.items() if seconds is not None}
    fields = {key: value for key, value in time.items() if key.removesuffix("_s") not in given}
    return {**fields, "inside_s": inside} if inside else fields


def read_profile(told: object, where: str) -> StepProfile:
    """A StepProfile from the output of `--json`; unknown keys are ignored.

    Raises SpecError, whose message begins with `where`.
    """
    from pydantic import TypeAdapter, ValidationError

    try:
        if not isinstance(told, Mapping) or told.get("schema") != SCHEMA:
            raise ValueError("schema must be 1")
        about = dict(told["provenance"])
        known = {**told, "provenance": {**about, "origin": about.get("from", "")}}
        known.setdefault("memory", None)
        profile = TypeAdapter(StepProfile).validate_python(_known(StepProfile, known))
        _check(profile)
        return profile
    except ValidationError as error:
        place = ".".join(str(part) for part in error.errors(include_url=False)[0]["loc"])
        raise SpecError(f"{where}: {place}: {value_sentence(error)}") from None
    except (KeyError, TypeError, ValueError) as error:
        raise SpecError(f"{where}: is not a StepProfile: {error}") from None


def _check(profile: StepProfile) -> None:
    """Raise ValueError for impossible numbers."""
    _check_sizes(profile.to_dict(), "")
    devices = profile.cluster.get("devices")
    if not isinstance(devices, int) or devices < 1:
        raise ValueError("cluster.devices must be a whole number, at least 1")
    memory, time, rates = profile.memory, profile.time, profile.throughput
    if memory is not None:
        if sum(memory.terms.values()) != memory.peak_allocated_bytes:
            raise ValueError("memory.terms must sum to memory.peak_allocated_bytes")
        if memory.capacity_bytes is not None and memory.capacity_bytes < 1:
            raise ValueError("memory.capacity_bytes must be more than 0")
    if time is not None:
        if time.step_s < 1e-9:
            raise ValueError("time.step_s must be more than 0")
        for name in ("step_s_interval", "step_s_spread"):
            between = getattr(time, name)
            if between is not None and between[0] > between[1]:
                raise ValueError(f"time.{name} must begin with the lower end")
    if rates is not None and max(rates.mfu or 0.0, rates.hfu or 0.0) > 1.5:
        raise ValueError("throughput.mfu and hfu are shares of a peak, such as 0.4")


def _check_sizes(value: object, where: str) -> None:
    """Raise ValueError for a number in the JSON that is negative or absurdly large."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            _check_sizes(part, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for part in value:
            _check_sizes(part, where)
    elif isinstance(value, (int, float)) and not 0 <= value < 1e30:
        raise ValueError(f"{where} must be at least 0, and no more than anything can be")


def read_profile_file(path: Path) -> StepProfile:
    """Read a StepProfile from a JSON file, such as a run's prediction.json."""
    return read_profile(read_json(path, "profile", 2**26), str(path))


def _known(record: type, told: Any) -> Any:
    """The JSON value with only the keys that are fields of the record and of its parts."""
    parts = {"provenance": Provenance, "memory": MemoryProfile, "traffic": CollectiveProfile,
             "work": WorkProfile, "time": TimeProfile,
             "throughput": ThroughputProfile, "parts": PartProfile}  # fmt: skip
    if isinstance(told, list):
        return [_known(record, one) for one in told]
    if not isinstance(told, Mapping):
        return told
    fields = record._fields  # type: ignore[attr-defined]
    kept = {key: value for key, value in told.items() if key in fields}
    if record is not StepProfile:
        return kept
    if isinstance(kept.get("time"), Mapping):
        kept["time"] = with_inside(kept["time"])
    return {k: _known(parts[k], v) if k in parts else v for k, v in kept.items()}


def throughput_of(
    work: WorkProfile, step_s: float, devices: int, peak_flops: float | None
) -> ThroughputProfile:
    """Tokens per second of a step, and MFU and HFU if the device's peak is given."""
    rate = work.tokens / step_s
    ideal = devices * peak_flops if peak_flops else None
    return ThroughputProfile(
        tokens_per_s=rate,
        tokens_per_s_per_device=rate / devices,
        mfu=work.model_flops / step_s / ideal if ideal else None,
        hfu=work.hardware_flops / step_s / ideal if ideal else None,
        mfu_convention=work.convention if ideal else None,
    )


def by_operation(
    traffic: Iterable[CollectiveProfile],
) -> dict[tuple[str, int, str], tuple[int, int]]:
    """Calls and bytes by operation, group size and axis, which is what a counter can observe.

    Groups that FSDP reshards to count as the shard axis. An axis that spans all processes uses the
    group of all processes, so these two are merged.
    """
    traffic = [one for one in traffic if one.group_size > 1]
    axes = {one.group_size: _AXIS.get(one.group, one.group) for one in traffic
            if one.group not in ("world", *OWN_GROUPS)}  # fmt: skip
    found: dict[tuple[str, int, str], tuple[int, int]] = {}
    for one in traffic:
        axis = axes.get(one.group_size, "world") if one.group == "world" else one.group
        key = (one.op, one.group_size, _AXIS.get(axis, axis))
        calls, size = found.get(key, (0, 0))
        found[key] = (calls + one.calls, size + one.bytes)
    return found


def relative_error(predicted: float, measured: float) -> float | None:
    """Relative error predicted / measured - 1; if `measured` is 0, 0.0 if both are, else None."""
    if measured == 0:
        return 0.0 if predicted == 0 else None
    return predicted / measured - 1


def _plain(value: Any) -> Any:
    """A value for JSON: NamedTuples and mappings as dicts without None, tuples as lists."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items() if part is not None}
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    return value
