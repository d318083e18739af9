"""Compare two records of a step term by term; and `compare`, which collects StepProfiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeVar

from shardwise.spec.quantity import GIB, show_gb, show_seconds, show_whole
from shardwise.spec.record import SpecError
from shardwise.step.notebook import html_of
from shardwise.step.profile import MemoryProfile, StepProfile, relative_error
from shardwise.step.words import MILLISECOND, TERMS, percent, strategy_words

Unit = Literal["GiB", "MiB", "bytes", "calls", "ns", "s", "share", "tokens/s"]
Writer = Callable[[float], str]
_WRITERS: dict[Unit, Writer] = {
    "GiB": lambda size: f"{size:,.2f} GiB",
    "MiB": lambda size: f"{size:,.2f} MiB",
    "bytes": show_gb,
    "calls": show_whole,
    "ns": lambda time: f"{time / MILLISECOND:,.2f} ms",
    "s": show_seconds,
    "share": lambda share: percent(share, 1),
    "tokens/s": show_whole,
}


class Term(NamedTuple):
    """One quantity of two records: its name, its unit, and both values; an unknown value is None.

    The first is predicted and the second measured, or the first is before and the second after.
    """

    name: str
    unit: Unit
    first: float | None
    second: float | None

    @property
    def error(self) -> float | None:
        """Relative error of the first value, a prediction: first / second - 1; None if unknown."""
        if self.first is None or self.second is None:
            return None
        return relative_error(self.first, self.second)

    @property
    def change(self) -> float | None:
        """Relative change from the first value: second / first - 1; None if unknown."""
        return relative_change(self.first, self.second)

    def texts(self, own: Mapping[Unit, Writer] | None = None) -> tuple[str, str]:
        """Both values as text with their unit; an unknown value is empty.

        `own` gives functions that write values of a unit, in place of the default ones.
        """
        write = {**_WRITERS, **(own or {})}[self.unit]
        first, second = ("" if v is None else write(v) for v in (self.first, self.second))
        return first, second


def relative_change(before: float | None, after: float | None) -> float | None:
    """Relative change after / before - 1; None if a value is None or `before` is 0."""
    return after / before - 1 if before and after is not None else None


# ---- the terms of two steps -----------------------------------------------------------------

# Terms that cannot be distinguished in a running program; they are compared as one term.
WORKING_TERMS = ("unsharded_gradients", "activations", "logits", "other")
_NAMES = {term: name for term, name in TERMS.items() if term not in WORKING_TERMS}
_NAMES["gradients"] = "reduced gradients"


def memory_terms(predicted: MemoryProfile, measured: MemoryProfile) -> list[Term]:
    """The memory terms of both profiles in GiB or MiB; the peak is the last.

    Terms that a measurement cannot distinguish are merged; terms that are 0 are left out.
    """
    first, second = dict(predicted.terms), dict(measured.terms)
    merged = [term for term in first if term in WORKING_TERMS or term not in second]
    first["working"] = sum(first.pop(term) for term in merged)
    large = sum(first.values()) >= GIB
    unit: Unit = "GiB" if large else "MiB"
    factor = GIB if large else 2**20
    sizes = {name: (first.get(term, 0), second.get(term, 0)) for term, name in _NAMES.items()}
    known = {name: pair for name, pair in sizes.items() if any(pair)}
    known["total"] = (predicted.peak_allocated_bytes, measured.peak_allocated_bytes)
    return [Term(name, unit, a / factor, b / factor) for name, (a, b) in known.items()]


Key = TypeVar("Key", str, tuple[str, int, str])
# Calls and bytes; unknown bytes are None.
Traffic = tuple[float, float | None]


def traffic_terms(
    predicted: Mapping[Key, Traffic], measured: Mapping[Key, Traffic], names: Mapping[Key, str]
) -> dict[Key, tuple[Term, Term]]:
    """The terms for calls and bytes of each collective in `names`; missing ones count as 0."""
    terms: dict[Key, tuple[Term, Term]] = {}
    for key in sorted(names):
        (calls, size), (real_calls, real_size) = (
            side.get(key, (0, 0)) for side in (predicted, measured)
        )
        terms[key] = (
            Term(f"{names[key]}: calls", "calls", calls, real_calls),
            Term(f"{names[key]}: bytes", "bytes", size, real_size),
        )
    return terms


def step_time(predicted: StepProfile | None, measured: StepProfile | None) -> Term | None:
    """The term for seconds of the step; None if they were not measured."""
    if measured is None or measured.time is None:
        return None
    guess = predicted.time.step_s if predicted is not None and predicted.time is not None else None
    return Term("time, median", "s", guess, measured.time.step_s)


def peak_memory(predicted: StepProfile | None, measured: StepProfile | None) -> Term | None:
    """The term for bytes of tensors at the peak; None if they were not measured."""
    if measured is None or measured.memory is None:
        return None
    guess = predicted.memory if predicted is not None else None
    first = guess.peak_allocated_bytes if guess is not None else None
    return Term("total", "bytes", first, measured.memory.peak_allocated_bytes)


def step_terms(predicted: StepProfile, measured: StepProfile) -> list[Term]:
    """Terms for step time, tokens/s and MFU; empty without a measured time.

    Tokens/s and MFU have no predicted value.
    """
    time, rates = step_time(predicted, measured), measured.throughput
    if time is None or rates is None:
        return []
    terms = [time, Term("tokens per second", "tokens/s", None, rates.tokens_per_s)]
    return terms if rates.mfu is None else [*terms, Term("MFU", "share", None, rates.mfu)]


# ---- profiles side by side ------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Profiles under their names, in the order given. Notebooks display them as bars."""

    profiles: tuple[StepProfile, ...]
    names: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The profiles by name, each as `--json` prints it."""
        return {n: p.to_dict() for n, p in zip(self.names, self.profiles, strict=True)}

    def __repr__(self) -> str:
        lines = [f"  {n}: {p!r}" for n, p in zip(self.names, self.profiles, strict=True)]
        return "\n".join([f"Comparison of {len(lines)} profiles", *lines])

    def _repr_html_(self) -> str:
        return html_of(self)


def compare(*profiles: StepProfile, names: Sequence[str] = ()) -> Comparison:
    """Put StepProfiles side by side: configurations, or a prediction and its measurement.

    One predicted and one measured profile are compared term by term, with the prediction error.

    Args:
        profiles: What `estimate` returned, or a run's prediction and measurement.
        names: One name per profile; by default strategy and kind, such as "zero3 predicted".

    Raises:
        SpecError: There are fewer than two profiles, or not one name for each.

    Examples:
        >>> kinds = ("zero2", "zero3")
        >>> profiles = [shardwise.estimate("llama-3-8b", "8xH100-SXM", kind) for kind in kinds]
        >>> shardwise.compare(*profiles, names=kinds)
    """
    problems = []
    if len(profiles) < 2:
        problems.append(f"compare: needs at least two profiles, got {len(profiles)}")
    if names and len(names) != len(profiles):
        problems.append(f"compare: {len(names)} names for {len(profiles)} profiles; give one each")
    if problems:
        raise SpecError(problems)
    return Comparison(profiles, tuple(names) or _names(profiles))


def _names(profiles: Sequence[StepProfile]) -> tuple[str, ...]:
    """A name for each profile: strategy and kind; numbered if two would be the same."""
    plain = [f"{strategy_words(p)} {p.provenance.kind}" for p in profiles]
    if len(set(plain)) == len(plain):
        return tuple(plain)
    return tuple(f"{number}: {name}" for number, name in enumerate(plain, start=1))
