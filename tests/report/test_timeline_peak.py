"""The peak of a measured curve and the one in the headline are the same or told apart."""

from __future__ import annotations

from shardwise.report.page.subject import Subject
from shardwise.report.page.timeline import _other_peak
from shardwise.step.profile import MemoryProfile, Provenance, StepProfile

MIB = 2**20


def measured(peak_bytes: int) -> Subject:
    profile = StepProfile(
        provenance=Provenance(kind="measured", shardwise="0", origin="run"),
        model={},
        cluster={"devices": 2},
        job={},
        strategy={},
        memory=MemoryProfile(peak_allocated_bytes=peak_bytes, terms={"other": peak_bytes}),
        traffic=(),
    )
    return Subject("run", "run", measured=profile)


def test_another_peak_is_explained_with_both_figures() -> None:
    [remark] = _other_peak(measured(140 * MIB), "", 150 * MIB)
    assert "140.0 MiB" in remark
    assert "150.0 MiB" in remark


def test_one_peak_needs_no_words() -> None:
    assert _other_peak(measured(140 * MIB), "", 140 * MIB + 1) == []
    assert _other_peak(Subject("run", "run"), "", 150 * MIB) == []
    assert _other_peak(measured(140 * MIB), "", 0) == []
