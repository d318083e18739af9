"""Memory at the peak: its terms as stacked bars against what a device has."""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.report.memory_words import profile_memory_words
from shardwise.report.page.bars import Bar, Limit, bars
from shardwise.report.page.markup import Markup, element, fragment
from shardwise.report.page.subject import Subject
from shardwise.report.words import TERMS, VERDICTS
from shardwise.spec.quantity import show_gib
from shardwise.step import StepProfile

# A capacity so far beyond the bars would leave nothing of them to see.
_FAR = 4.0
_MOST_RESERVES = 6


def memory_section(subjects: Sequence[Subject]) -> Markup | None:
    """Predicted beside measured, for everyone whose memory is known."""
    profiles = [(s, profile) for s in subjects for profile in s.profiles if profile.memory]
    if not profiles:
        return None
    rows = [_bar(subject, profile) for subject, profile in profiles]
    most = max(sum(row.parts.values()) for row in rows)
    # Of different machines no line is true for all.
    capacities = {p.memory.capacity_bytes for _, p in profiles if p.memory} - {None}
    capacity = next(iter(capacities)) if len(capacities) == 1 else None
    near = capacity is not None and capacity <= _FAR * most
    limit = Limit("capacity", capacity) if capacity is not None and near else None
    told = []
    if capacity is not None and not near:
        told.append(f"A device has {show_gib(capacity)}: the fullest takes {most / capacity:.1%}.")
    for subject, profile in profiles if len(subjects) <= _MOST_RESERVES else []:
        told += _reserve(subject, profile, len(subjects) > 1)
    return fragment(
        element("p", "What is alive at the moment when most is, on the fullest device."),
        bars(rows, TERMS, show_gib, limit=limit, what="Memory at the peak by term"),
        [element("p", sentence, class_="fine") for sentence in told],
    )


def _bar(subject: Subject, profile: StepProfile) -> Bar:
    memory = profile.known_memory
    parts = {term: float(memory.terms.get(term, 0)) for term in TERMS}
    # Terms nobody has told us of must not make a bar shorter.
    parts["other"] += float(sum(size for term, size in memory.terms.items() if term not in TERMS))
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
