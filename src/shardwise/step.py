"""StepProfile: what one optimizer step takes. Prediction and measurement are the same record.

A value that is not known is absent, never zero: fields left at None do not appear in the JSON.
Everything is per device unless a name says otherwise.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from shardwise.spec.record import Record

SCHEMA = 1

Bytes = Annotated[int, Field(ge=0)]


class Provenance(Record):
    """How the numbers came to be."""

    kind: Literal["predicted", "simulated", "measured"]
    shardwise: str
    origin: Annotated[str, Field(alias="from")]

    model_config = ConfigDict(populate_by_name=True)


class MemoryProfile(Record):
    """Memory of the fullest device. `terms` are those alive at the peak and sum to it."""

    fits: bool | None = None
    verdict: Literal["fits", "at risk", "does not fit"] | None = None
    capacity_bytes: Bytes | None = None
    peak_allocated_bytes: Bytes
    peak_reserved_bytes: tuple[Bytes, Bytes] | None = None
    peak_phase: str | None = None
    terms: dict[str, Bytes]
    phases: dict[str, Bytes] | None = None
    host_bytes: Bytes | None = None


class CollectiveProfile(Record):
    """One kind of collective: `bytes` is the whole group's message, summed over the calls."""

    op: str
    group: str
    group_size: Annotated[int, Field(ge=1)]
    calls: Bytes
    bytes: Bytes


class WorkProfile(Record):
    """Tokens and FLOPs of one step over all devices."""

    tokens: Annotated[int, Field(ge=1)]
    model_flops: float
    hardware_flops: float
    convention: str


class StepProfile(Record):
    """One optimizer step, predicted, simulated or measured."""

    version: Annotated[int, Field(alias="schema")] = SCHEMA
    provenance: Provenance
    model: dict[str, Any]
    cluster: dict[str, Any]
    job: dict[str, Any]
    strategy: dict[str, Any]
    memory: MemoryProfile
    traffic: list[CollectiveProfile]
    work: WorkProfile | None = None

    model_config = ConfigDict(populate_by_name=True)

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
