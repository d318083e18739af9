"""What changed between two answers, as HTML."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.report.page.markup import Markup, element
from shardwise.spec.quantity import show_count, show_gib
from shardwise.step.comparison import Term, Unit, Writer
from shardwise.step.profile import StepProfile
from shardwise.step.words import TERMS, signed_percent

# Relative changes below this are not shown.
_SAME = 0.0005
_MEMORY = {term: f"memory.{term}" for term in TERMS}
# Names and units of figures, in the order in which they are shown.
_FIGURES: dict[str, tuple[str, Unit]] = {
    "step_s": ("step", "s"),
    "tokens_per_s": ("tokens/s", "tokens/s"),
    "mfu": ("MFU", "share"),
    "exposed_s": ("exposed communication", "s"),
    "needed_bytes": ("memory with reserve", "bytes"),
    **{_MEMORY[term]: (name, "bytes") for term, name in TERMS.items()},
}
_WRITERS: dict[Unit, Writer] = {"tokens/s": show_count, "bytes": show_gib}


def figures_of(profile: StepProfile | None) -> dict[str, float]:
    """Figures of an answer by name, to compare the next answer with; empty for None.

    Seconds, tokens/s, bytes per device, and MFU as a share.
    """
    if profile is None:
        return {}
    known: dict[str, float | None] = {}
    if profile.time is not None:
        known["step_s"] = profile.time.step_s
        known["exposed_s"] = profile.time.exposed_communication_s
    if profile.throughput is not None:
        known["tokens_per_s"] = profile.throughput.tokens_per_s
        known["mfu"] = profile.throughput.mfu
    if profile.memory is not None:
        known["needed_bytes"] = profile.memory.needed_bytes
        known |= {_MEMORY[term]: size for term, size in profile.memory.terms.items()}
    return {name: float(value) for name, value in known.items() if value is not None}


def changed_words(before: Mapping[str, float] | None, after: Mapping[str, float]) -> str:
    """HTML list of figures that changed, or "Nothing changed."; empty without an answer before."""
    if not before or not after:
        return ""
    changes = [
        _change(Term(name, unit, before[key], after[key]))
        for key, (name, unit) in _FIGURES.items()
        if key in before and key in after and not _same(before[key], after[key])
    ]
    if not changes:
        return str(element("p", "Nothing changed.", class_="fine"))
    return str(element("ul", changes, class_="changes"))


def _same(was: float, now: float) -> bool:
    """Whether two figures differ by less than `_SAME`, relative to the larger one."""
    return abs(now - was) <= _SAME * max(abs(was), abs(now))


def _change(term: Term) -> Markup:
    """A list item with a figure before and after, and its relative change."""
    was, now = term.texts(_WRITERS)
    by = f" ({signed_percent(term.change, 1)})" if term.change is not None else ""
    return element("li", element("span", term.name), f" {was} → {now}{by}")
