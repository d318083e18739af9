"""Memory at the peak: its terms as stacked bars, against the memory of a device."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.report.page.bars import Bar, Limit, bars
from shardwise.report.page.markup import Markup, element, fragment
from shardwise.report.page.subject import Subject
from shardwise.step.memory_words import profile_memory_words, show_memory
from shardwise.step.profile import StepProfile
from shardwise.step.words import TERMS, VERDICTS

# A limit beyond this multiple of the longest bar is stated in words, not drawn.
_FAR = 4.0
_MOST_RESERVES = 6
_OVERHEAD = "overhead"
_PARTS = {**TERMS, _OVERHEAD: "allocator overhead"}


def memory_section(subjects: Sequence[Subject]) -> Markup | None:
    """Bars of bytes per device at the peak, predicted and measured; None if unknown."""
    profiles = [(s, profile) for s in subjects for profile in s.profiles if profile.memory]
    if not profiles:
        return None
    # A measurement covers tensors only, so a prediction shown with one does too. Predictions alone
    # include the allocator overhead.
    whole = all(_needed(profile) is not None for _, profile in profiles)
    rows = [_bar(subject, profile, whole) for subject, profile in profiles]
    most = max(sum(row.parts.values()) for row in rows)
    # A line is drawn only if it holds for all machines.
    name = "usable" if whole else "capacity"
    limits = {_limit(p, whole) for _, p in profiles} - {None}
    at = next(iter(limits)) if len(limits) == 1 else None
    near = at is not None and at <= _FAR * most
    limit = Limit(name, at) if at is not None and near else None
    told = []
    if at is not None and not near:
        told.append(f"A device has {show_memory(at)} ({name}): the fullest takes {most / at:.1%}.")
    for subject, profile in profiles if len(subjects) <= _MOST_RESERVES else []:
        told += _reserve(subject, profile, len(subjects) > 1)
    return fragment(
        element("p", f"Memory at its peak, on the fullest device{_overhead_words(whole)}."),
        bars(rows, _PARTS, show_memory, limit=limit, what="Memory at the peak by term"),
        [element("p", sentence, class_="fine") for sentence in told],
    )


def _overhead_words(whole: bool) -> str:
    """Words for a sentence: that allocator overhead is included, if `whole`."""
    return ", with the allocator's overhead" if whole else ""


def _needed(profile: StepProfile) -> int | None:
    """Bytes per device with allocator overhead; None for a measurement."""
    return profile.known_memory.needed_bytes


def _limit(profile: StepProfile, whole: bool) -> int | None:
    """Bytes that a bar is compared with: usable memory if `whole`, else the capacity."""
    memory = profile.known_memory
    return memory.usable_bytes if whole else memory.capacity_bytes


def _bar(subject: Subject, profile: StepProfile, whole: bool) -> Bar:
    """Bar of bytes at the peak by term, with allocator overhead if `whole`."""
    memory = profile.known_memory
    parts = {term: float(memory.terms.get(term, 0)) for term in TERMS}
    # Unknown terms count as "other", so that the total is right.
    parts["other"] += float(sum(size for term, size in memory.terms.items() if term not in TERMS))
    if whole:
        parts[_OVERHEAD] = float((memory.needed_bytes or 0) - memory.peak_allocated_bytes)
    return Bar(
        subject.name,
        profile.provenance.kind,
        {term: size for term, size in parts.items() if size},
        f"in {memory.peak_phase}" if memory.peak_phase else "",
    )


def _reserve(subject: Subject, profile: StepProfile, several: bool) -> list[str]:
    """Sentences on needed and usable memory and the verdict; empty for a measurement.

    With `several` subjects, they start with the name.
    """
    memory = profile.known_memory
    if memory.needed_bytes is None or memory.verdict is None:
        return []
    who = f"{subject.name}. " if several else ""
    return [
        f"{who}{profile_memory_words(memory)} It {VERDICTS[memory.verdict].words} "
        f"({profile.provenance.kind})."
    ]
