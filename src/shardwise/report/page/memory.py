"""Memory at the peak: its terms as stacked bars against what a device has."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.report.page.bars import Bar, Limit, bars
from shardwise.report.page.markup import Markup, element, fragment
from shardwise.report.page.subject import Subject
from shardwise.step.memory_words import profile_memory_words, show_memory
from shardwise.step.profile import StepProfile
from shardwise.step.words import TERMS, VERDICTS

# A capacity so far beyond the bars would leave nothing of them to see.
_FAR = 4.0
_MOST_RESERVES = 6
_OVERHEAD = "overhead"
_PARTS = {**TERMS, _OVERHEAD: "allocator overhead"}


def memory_section(subjects: Sequence[Subject]) -> Markup | None:
    """Predicted beside measured, for everyone whose memory is known."""
    profiles = [(s, profile) for s in subjects for profile in s.profiles if profile.memory]
    if not profiles:
        return None
    # A measurement is of tensors: beside one, a prediction is too. Alone it is what must have room.
    whole = all(_needed(profile) is not None for _, profile in profiles)
    rows = [_bar(subject, profile, whole) for subject, profile in profiles]
    most = max(sum(row.parts.values()) for row in rows)
    # Of different machines no line is true for all.
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
        element("p", f"Memory at its peak, on the fullest device{_and_more(whole)}."),
        bars(rows, _PARTS, show_memory, limit=limit, what="Memory at the peak by term"),
        [element("p", sentence, class_="fine") for sentence in told],
    )


def _and_more(whole: bool) -> str:
    return ", with the allocator's overhead" if whole else ""


def _needed(profile: StepProfile) -> int | None:
    return profile.known_memory.needed_bytes


def _limit(profile: StepProfile, whole: bool) -> int | None:
    """What the bar of a profile is compared with: the limit of its verdict, or the capacity."""
    memory = profile.known_memory
    return memory.usable_bytes if whole else memory.capacity_bytes


def _bar(subject: Subject, profile: StepProfile, whole: bool) -> Bar:
    memory = profile.known_memory
    parts = {term: float(memory.terms.get(term, 0)) for term in TERMS}
    # Terms nobody has told us of must not make a bar shorter.
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
    memory = profile.known_memory
    if memory.needed_bytes is None or memory.verdict is None:
        return []
    who = f"{subject.name}. " if several else ""
    return [
        f"{who}{profile_memory_words(memory)} It {VERDICTS[memory.verdict].words} "
        f"({profile.provenance.kind})."
    ]
