"""StepProfile: what one optimizer step takes. Prediction and measurement are the same record.

A value that is not known is absent, never zero: fields left at None do not appear in the JSON.
Everything is per device unless a name says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

SCHEMA = 1

Verdict = Literal["fits", "at risk", "does not fit"]


class Provenance(NamedTuple):
    """How the numbers came to be."""

    kind: Literal["predicted", "simulated", "measured"]
    shardwise: str
    origin: str


class MemoryProfile(NamedTuple):
    """Memory of the fullest device. `terms` are those alive at the peak and sum to it."""

    peak_allocated_bytes: int
    terms: Mapping[str, int]
    fits: bool | None = None
    verdict: Verdict | None = None
    capacity_bytes: int | None = None
    peak_reserved_bytes: tuple[int, int] | None = None
    # With what a process holds outside the allocator: what is compared with the capacity.
    occupied_bytes: tuple[int, int] | None = None
    peak_phase: str | None = None
    phases: Mapping[str, int] | None = None
    host_bytes: int | None = None


class CollectiveProfile(NamedTuple):
    """One kind of collective: `bytes` is the whole group's message, summed over the calls."""

    op: str
    group: str
    group_size: int
    calls: int
    bytes: int


class WorkProfile(NamedTuple):
    """Tokens and FLOPs of one step over all devices."""

    tokens: int
    model_flops: float
    hardware_flops: float
    convention: str


class StepProfile(NamedTuple):
    """One optimizer step, predicted, simulated or measured."""

    provenance: Provenance
    model: Mapping[str, Any]
    cluster: Mapping[str, Any]
    job: Mapping[str, Any]
    strategy: Mapping[str, Any]
    memory: MemoryProfile
    traffic: tuple[CollectiveProfile, ...]
    work: WorkProfile | None = None

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        plain: dict[str, Any] = {"schema": SCHEMA, **_plain(self)}
        plain["provenance"]["from"] = plain["provenance"].pop("origin")
        return plain


def _plain(value: Any) -> Any:
    """Records as dictionaries without their unknown fields."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items() if part is not None}
    if isinstance(value, (tuple, list)):
        return [_plain(part) for part in value]
    return value
