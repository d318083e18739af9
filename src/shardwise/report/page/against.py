"""Predicted and measured values term by term, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwise.observe.against import compare_rank, traffic_terms
from shardwise.report.compare import compare
from shardwise.report.page.bars import badge
from shardwise.report.page.chart import Axis, Series, chart
from shardwise.report.page.markup import Content, Markup, element, fragment, table
from shardwise.report.page.subject import Subject
from shardwise.spec.quantity import show_seconds
from shardwise.step.comparison import Term, Unit, Writer, peak_memory, step_time
from shardwise.step.words import error_words, strategy_words

# Runs from which a scatter plot comes first, and most runs with a table of terms.
_SCATTERED, _MOST_TERMS = 12, 50
_STEPS: dict[Unit, Writer] = {"ns": lambda time: show_seconds(time / 1e9)}
_PEAKS: dict[Unit, Writer] = {"bytes": lambda size: f"{size / 2**20:,.1f} MiB"}


def deviation_section(subjects: Sequence[Subject]) -> Markup | None:
    """Predicted against measured: all terms of one run; step time and memory of several.

    None if no run has both.
    """
    pairs = [s for s in subjects if s.predicted is not None and s.measured is not None]
    if not pairs:
        return None
    if len(subjects) == 1:
        return _terms(pairs[0])
    overview = _overview(pairs)
    if len(pairs) >= _SCATTERED:
        overview = fragment(
            _scatter_plot(pairs), element("details", element("summary", "Table"), overview)
        )
    terms = [
        element("details", element("summary", one.name), _terms(one)) for one in pairs[:_MOST_TERMS]
    ]
    left = len(pairs) - len(terms)
    more = f"{left} more are not shown; pass fewer arguments to see them." if left > 0 else None
    return fragment(
        overview,
        element("details", element("summary", "Term by term"),
                element("div", terms, class_="inner"), more),
    )  # fmt: skip


def _scatter_plot(pairs: Sequence[Subject]) -> Markup:
    """Scatter plot of seconds per step: measured (x) against predicted (y)."""
    groups: dict[str, list[tuple[float, float, str]]] = {}
    for one in pairs:
        mine, real = one.predicted, one.measured
        if mine is not None and real is not None and mine.time and real.time:
            point = (real.time.step_s, mine.time.step_s, one.name)
            groups.setdefault(strategy_words(real), []).append(point)
    if not groups:
        return fragment()
    every = [value for points in groups.values() for a, b, _ in points for value in (a, b)]
    low, high = min(every), max(every)
    series = [Series("predicted = measured", [(low, low), (high, high)], colour=5)]
    series += [
        Series(name, [(a, b) for a, b, _ in points], "measured", number, line=False,
               titles=[f"{of}: {show_seconds(b)} predicted, {show_seconds(a)}"
                       for a, b, of in points])
        for number, (name, points) in enumerate(groups.items())
    ]  # fmt: skip
    x = Axis("measured step", show_seconds, logarithmic=True)
    return chart(x, Axis("predicted step", show_seconds, logarithmic=True), series,
                 "Predicted and measured step times; on the diagonal both are equal."
                 )  # fmt: skip


def show_error(error: float | None) -> Markup | None:
    """A relative prediction error, coloured by its size; None for None."""
    if error is None:
        return None
    told, tone = error_words(error)
    return element("span", told, class_=tone)


def _terms(one: Subject) -> Markup:
    """Tables of all terms of one run, predicted and measured."""
    assert one.predicted is not None
    assert one.measured is not None
    rows: list[list[Content]] = []
    for heading, found in compare(one.predicted, one.measured).items():
        rows.append([element("b", heading), "", "", ""])
        rows += [[r.name.strip(), r.predicted, r.measured, show_error(r.error)] for r in found]
    head = ["", badge("predicted"), badge("measured"), "error"]
    return element("div", table(head, rows), _profiled(one), class_="tables")


def _profiled(one: Subject) -> Markup | None:
    """Table of the simulated step and the profiled step of the first rank; None without both."""
    if one.simulated is None or one.traced is None:
        return None
    rank = one.traced.summary.ranks[0]
    traffic = traffic_terms(one.predicted.traffic if one.predicted else (), rank)
    terms = [*compare_rank(one.simulated, rank).terms, *traffic]
    rows: list[list[Content]] = [[term.name, *_cells(term, _STEPS)] for term in terms]
    head = [f"profiled step, {rank.name}", badge("simulated"), badge("measured"), "error"]
    return table(head, rows)


def _cells(term: Term | None, own: Mapping[Unit, Writer] | None = None) -> list[Content]:
    """Three cells: both values and the error; empty if `term` is None.

    `own` overrides how units are written.
    """
    return ["", "", None] if term is None else [*term.texts(own), show_error(term.error)]


def _overview(pairs: Sequence[Subject]) -> Markup:
    """Table of step time and peak memory of several runs, predicted and measured."""
    rows: list[list[Content]] = []
    for one in pairs:
        step = step_time(one.predicted, one.measured)
        peak = peak_memory(one.predicted, one.measured)
        rows.append([one.name, *_cells(step), *_cells(peak, _PEAKS)])
    weighed = any(any(row[4:]) for row in rows)
    head: list[Content] = ["", fragment("step ", badge("predicted")),
                           fragment("step ", badge("measured")), "error"]  # fmt: skip
    if weighed:
        head += [fragment("peak ", badge("predicted")), fragment("peak ", badge("measured")),
                 "error"]  # fmt: skip
    return table(head, [row if weighed else row[:4] for row in rows])
