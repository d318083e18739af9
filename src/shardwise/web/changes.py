"""What changed between two answers, in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardwise.report.page.markup import Markup, element
from shardwise.spec.quantity import show_count, show_gib, show_seconds
from shardwise.step.profile import StepProfile, relative_error
from shardwise.step.words import TERMS, percent, signed_percent

_MEMORY = "memory."
# Differences below this are not told.
_SAME = 0.0005
_SHOWN: dict[str, tuple[str, Callable[[float], str]]] = {
    "step_s": ("step", show_seconds),
    "tokens_per_s": ("tokens/s", show_count),
    "mfu": ("MFU", lambda share: percent(share, 1)),
    "exposed_s": ("exposed communication", show_seconds),
    "needed_bytes": ("memory with reserve", show_gib),
}


def figures_of(profile: StepProfile | None) -> dict[str, float]:
    """The numbers of an answer that the next one is compared with."""
    if profile is None:
        return {}
    found: dict[str, float | None] = {}
    if profile.time is not None:
        found["step_s"] = profile.time.step_s
        found["exposed_s"] = profile.time.exposed_communication_s
    if profile.throughput is not None:
        found["tokens_per_s"] = profile.throughput.tokens_per_s
        found["mfu"] = profile.throughput.mfu
    if profile.memory is not None:
        found["needed_bytes"] = profile.memory.needed_bytes
        found |= {f"{_MEMORY}{term}": size for term, size in profile.memory.terms.items()}
    return {name: float(value) for name, value in found.items() if value is not None}


def changed_words(before: Mapping[str, float] | None, after: Mapping[str, float]) -> str:
    """A list of what changed, the most important first; empty where nothing did."""
    if not before or not after:
        return ""
    told = []
    for name in [*_SHOWN, *(n for n in after if n.startswith(_MEMORY))]:
        if name not in before or name not in after:
            continue
        was, now = before[name], after[name]
        if abs(now - was) <= _SAME * max(abs(was), abs(now)):
            continue
        what, show = _SHOWN.get(name) or (_term(name), show_gib)
        told.append(_change(what, show(was), show(now), relative_error(now, was)))
    if not told:
        return str(element("p", "Nothing changed.", class_="fine"))
    return str(element("ul", told, class_="changes"))


def _change(what: str, was: str, now: str, ratio: float | None) -> Markup:
    by = f" ({signed_percent(ratio, 1)})" if ratio is not None else ""
    return element("li", element("span", what), f" {was} → {now}{by}")


def _term(name: str) -> str:
    term = name.removeprefix(_MEMORY)
    return TERMS.get(term, term)
