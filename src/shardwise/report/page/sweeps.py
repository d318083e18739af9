"""Many profiles as curves: step time against the one quantity that varies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardwise.report.page.chart import Axis, Series, chart
from shardwise.report.page.markup import Markup, element, fragment
from shardwise.report.page.subject import Subject
from shardwise.spec.quantity import show_seconds, show_whole
from shardwise.step.profile import StepProfile
from shardwise.step.words import strategy_words


class _Quantity(NamedTuple):
    """A quantity that may vary: its title, how to read it from a profile, how to show it."""

    title: str
    read: Callable[[StepProfile], object]
    show: Callable[[float], str]


def _gbps(value: float) -> str:
    return f"{value:g} Gbps"


_QUANTITIES = (
    _Quantity("network per device", lambda p: p.cluster.get("network_gbps"), _gbps),
    _Quantity("devices", lambda p: p.cluster.get("devices"), show_whole),
    _Quantity("sequence length", lambda p: p.job.get("seq_len"), show_whole),
    _Quantity("micro-batch", lambda p: p.strategy.get("micro_batch"), show_whole),
    _Quantity("accumulation steps", lambda p: p.strategy.get("accumulate"), show_whole),
)
# Fewest values for a curve.
_LEAST = 3
_MOST_FIGURES = 4


def sweep_section(subjects: Sequence[Subject]) -> Markup | None:
    """Charts of step time and exposed communication against the quantity with most values.

    None if no quantity has at least three values.
    """
    known = [one for one in subjects if one.profile is not None and one.profile.time is not None]
    quantity = _varied(known)
    if quantity is None:
        return None
    drawn = []
    for title, group in _groups(known, quantity).items():
        lines = _lines(group, quantity)
        if not any(len(line.points) >= _LEAST for line in lines):
            continue
        marks = sorted({x for line in lines for x, _ in line.points})
        x = Axis(quantity.title, quantity.show, True, marks)
        of = f" ({title})" if title else ""
        drawn.append(
            chart(x, Axis(f"step{of}", show_seconds, True), lines,
                  f"Step time by {quantity.title}{of}, predicted and measured.")
        )  # fmt: skip
        shares = _lines(group, quantity, share=True)
        if shares:
            y = Axis(f"exposed communication{of}", lambda v: f"{v:.0%}", from_zero=True)
            alt = f"Exposed communication as a share of the step, by {quantity.title}{of}."
            drawn.append(chart(x, y, shares, alt))
        if len(drawn) >= _MOST_FIGURES:
            break
    if not drawn:
        return None
    return fragment(
        element("p", f"Effect of {quantity.title}. Lines are predicted, dots measured."),
        element("div", drawn, class_="pair"),
    )


def _number(value: object) -> float | None:
    """A positive number as a float; None for anything else."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if number and value > 0 else None  # type: ignore[arg-type, operator]


def _value(subject: Subject, quantity: _Quantity) -> float | None:
    """The value of a quantity for a subject; None if it is unknown."""
    return _number(quantity.read(subject.profile)) if subject.profile is not None else None


def _varied(subjects: Sequence[Subject]) -> _Quantity | None:
    """The quantity with the most distinct values; None if that is fewer than `_LEAST`."""
    counts = [len({_value(s, q) for s in subjects} - {None}) for q in _QUANTITIES]
    most = max(counts)
    return _QUANTITIES[counts.index(most)] if most >= _LEAST else None


def _groups(subjects: Sequence[Subject], varied: _Quantity) -> dict[str, list[Subject]]:
    """Subjects that differ only in strategy and `varied`, by a title of their other quantities."""
    others = [q for q in _QUANTITIES if q is not varied
              and len({_value(s, q) for s in subjects} - {None}) > 1]  # fmt: skip
    found: dict[str, list[Subject]] = {}
    for subject in subjects:
        if _value(subject, varied) is None:
            continue
        told = [(q, _value(subject, q)) for q in others]
        title = ", ".join(f"{q.title} {q.show(v)}" for q, v in told if v is not None)
        found.setdefault(title, []).append(subject)
    return found


def _lines(subjects: Sequence[Subject], x: _Quantity, share: bool = False) -> list[Series]:
    """A series per strategy and kind: seconds per step or, with `share`, its exposed share."""
    names = list(dict.fromkeys(_label(s) for s in subjects))
    lines = []
    for kind in ("predicted", "measured"):
        for colour, name in enumerate(names):
            points = []
            for subject in subjects:
                profile: StepProfile | None = getattr(subject, kind)
                at = _value(subject, x)
                if _label(subject) != name or profile is None or profile.time is None or at is None:
                    continue
                exposed = profile.time.exposed_communication_s
                if not share:
                    points.append((at, profile.time.step_s))
                elif exposed is not None:
                    points.append((at, exposed / profile.time.step_s))
            if points:
                line = kind == "predicted"
                lines.append(Series(name, sorted(points), kind, colour, line=line))
    return lines


def _label(subject: Subject) -> str:
    """The strategy of a subject in words."""
    assert subject.profile is not None
    return strategy_words(subject.profile)


def best_by_value(subjects: Sequence[Subject]) -> list[str]:
    """Two sentences: the fastest subject at the lowest and at the highest value.

    Empty if no quantity varies enough.
    """
    known = [one for one in subjects if one.profile is not None and one.profile.throughput]
    quantity = _varied(known)
    if quantity is None:
        return []
    values = sorted({v for one in known if (v := _value(one, quantity)) is not None})
    told = []
    for value in (values[0], values[-1]):
        here = [one for one in known if _value(one, quantity) == value]
        best = max(here, key=_tokens_per_s)
        assert best.profile is not None
        told.append(
            f"Fastest at {quantity.title} {quantity.show(value)}: {strategy_words(best.profile)} "
            f"({best.name}, {best.profile.provenance.kind})."
        )
    return told


def _tokens_per_s(one: Subject) -> float:
    """Tokens/s of a subject; 0 if unknown."""
    assert one.profile is not None
    return one.profile.throughput.tokens_per_s if one.profile.throughput else 0.0
