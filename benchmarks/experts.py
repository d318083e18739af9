"""Published runs with expert parallelism against predictions: coefficients on `fit`, then others.

    python -m benchmarks.experts [--held-out] [--write]

Three coefficients are fitted, all others are those of the catalogue: what sorting and combining a
routed token takes, and the level of two stacks. `--held-out` judges the rows that were held out;
`--write` puts the results into docs/accuracy-experts.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks import prices
from benchmarks.expert_runs import Published, published, read_experts
from benchmarks.intervals import factor
from benchmarks.prices import Values
from benchmarks.validation import Row
from shardwise.step.words import signed_percent

Numbers = npt.NDArray[np.floating[Any]]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "accuracy-experts.md"
BEGIN, END = "<!-- runs: written by python -m benchmarks.experts -->", "<!-- end of runs -->"
# TransformerEngine's kernels join neighbouring element-wise operations wholly.
KNOWN: Values = {"automodel.fused": 1.0, "megatron-bridge.fused": 1.0}
# How far a coefficient may lie from its start, as a logarithm; routing starts at that of others.
DEVIATIONS = {"library_routed_s": 0.7, "automodel.level": 0.1, "megatron-bridge.level": 0.1}
# A log error of so much weighs as much as one deviation.
NOISE = 0.1
ROUNDS = 15
# A run says something of a coefficient that moves its speed by a fiftieth of its own change.
SAYS_SOMETHING = 0.02


class Judged(NamedTuple):
    """A run, and its predicted tokens per second over the measured ones, less 1."""

    run: Published
    error: float


def starts() -> Values:
    """The coefficients before any run is looked at: those of the catalogue, and levels of 1."""
    shipped = prices.shipped()
    begin = {**dict.fromkeys(DEVIATIONS, 1.0), "library_routed_s": shipped["routed_s"]}
    return {**shipped, **KNOWN, **begin}


def group_of(run: Published) -> tuple[str, ...]:
    """Releases of one configuration count as one: their runs differ by software alone."""
    return run.stack, run.model, run.gpu, run.precision


def fit(rows: Sequence[Row], runs: dict[str, Published]) -> Values:
    """Least squares of log errors; configurations weigh by the root of their releases."""
    from scipy.optimize import least_squares  # type: ignore[import-untyped]  # only for fits

    names, known = list(DEVIATIONS), starts()
    begin = np.log([known[name] for name in names])
    deviation = np.asarray(list(DEVIATIONS.values()))
    truth = np.log([row.tokens_per_s for row in rows])
    groups = [group_of(runs[row.id]) for row in rows]
    weights = np.asarray([groups.count(group) ** -0.5 for group in groups])

    def values(packed: Numbers) -> Values:
        found = np.exp(packed).tolist()
        return {**known, **dict(zip(names, found, strict=True))}

    def residuals(packed: Numbers) -> Numbers:
        off = np.log(prices.predicted(rows, values(packed))) - truth
        return np.concatenate([weights * off / NOISE, (packed - begin) / deviation])

    done = least_squares(residuals, begin, diff_step=1e-3, loss="soft_l1", max_nfev=ROUNDS)
    return values(done.x)


def judge(rows: Sequence[Row], runs: dict[str, Published], values: Values) -> list[Judged]:
    """The error of each run."""
    if not rows:
        return []
    predicted = prices.predicted(rows, values)
    return [
        Judged(runs[row.id], float(speed / row.tokens_per_s - 1.0))
        for row, speed in zip(rows, predicted, strict=True)
    ]


def left_out(
    rows: Sequence[Row], runs: dict[str, Published], part: Callable[[Published], object]
) -> list[Judged]:
    """Errors of each part of the runs with coefficients fitted to the others."""
    found: list[Judged] = []
    for name in dict.fromkeys(part(runs[row.id]) for row in rows):
        inside = [row for row in rows if part(runs[row.id]) == name]
        others = [row for row in rows if part(runs[row.id]) != name]
        found += judge(inside, runs, fit(others, runs))
    return found


def identified(rows: Sequence[Row], runs: dict[str, Published], values: Values) -> dict[str, int]:
    """The number of stacks whose runs say something of a coefficient."""
    before = np.log(prices.predicted(rows, values))
    found = {}
    for name in DEVIATIONS:
        changed = {**values, name: values[name] * np.exp(-0.1)}
        moved = np.abs(np.log(prices.predicted(rows, changed)) - before) / 0.1
        says = [row for row, size in zip(rows, moved, strict=True) if size >= SAYS_SOMETHING]
        found[name] = len({runs[row.id].stack for row in says})
    return found


def interval(alone: Sequence[Judged]) -> float:
    """The factor, up or down, that nine of ten runs stay within, stacks weighing alike."""
    stacks = dict.fromkeys(one.run.stack for one in alone)
    return factor(
        [np.asarray([np.log1p(o.error) for o in alone if o.run.stack == s]) for s in stacks]
    )


class Result(NamedTuple):
    """A study: coefficients, errors on `fit`, with parts left out, and on rows held out."""

    values: Values
    stacks: dict[str, int]
    fitted: list[Judged]
    models_out: list[Judged]
    stacks_out: list[Judged]
    held: list[Judged]
    # Reasons why runs of both sides are not covered, and how many.
    reasons: dict[str, int]


def study(*, held_out: bool) -> Result:
    """Fit, leave parts out, and judge the rows held out if asked to."""
    runs = {run.id: run for run in published(("fit", "heldout"))}
    rows, left = read_experts(("fit",))
    values = fit(rows, runs)
    others, left_of_held = read_experts(("heldout",)) if held_out else ([], [])
    reasons: dict[str, int] = {}
    for one in (*left, *left_of_held):
        reasons[one.why] = reasons.get(one.why, 0) + 1
    return Result(
        values=values,
        stacks=identified(rows, runs, values),
        fitted=judge(rows, runs, values),
        models_out=left_out(rows, runs, lambda run: (run.stack, run.model, run.gpu)),
        stacks_out=left_out(rows, runs, lambda run: run.stack),
        held=judge(others, runs, values),
        reasons=reasons,
    )


# ---- words --------------------------------------------------------------------------------------


def summary(judged: Sequence[Judged], within: float) -> str:
    """Rows, median and 90th percentile of the error, bias and coverage, as cells of a table."""
    errors = np.asarray([one.error for one in judged])
    inside = np.abs(np.log1p(errors)) <= np.log(within)
    size = np.abs(errors)
    figures = (np.median(size), np.quantile(size, 0.9), np.median(errors), inside.mean())
    cells = (f"{len(judged)}", f"{figures[0]:.1%}", f"{figures[1]:.1%}", f"{figures[2]:+.1%}")
    return " | ".join((*cells, f"{figures[3]:.0%}"))


HEADER = """\
| runs | rows | median | 90 % within | bias | inside the interval |
|---|--:|--:|--:|--:|--:|
"""


def lines(result: Result) -> Iterable[str]:
    """The results as Markdown."""
    within = interval(result.models_out)
    new = interval(result.stacks_out)
    yield HEADER.rstrip("\n")
    yield f"| fitted | {summary(result.fitted, within)} |"
    yield f"| model and device left out | {summary(result.models_out, within)} |"
    yield f"| stack left out | {summary(result.stacks_out, new)} |"
    if result.held:
        yield f"| held out | {summary(result.held, within)} |"
    yield ""
    yield (
        f"Nine of ten runs of a known stack stay within a factor of {within:.2f}, of a stack left "
        f"out within {new:.2f}."
    )
    yield ""
    yield "| coefficient | start | fitted | stacks that identify it |"
    yield "|---|--:|--:|--:|"
    known = starts()
    for name, count in result.stacks.items():
        yield f"| `{name}` | {known[name]:.3g} | {result.values[name]:.3g} | {count} |"
    yield ""
    yield "| stack, model, device | precision, experts over | split | rows | error | dispatcher |"
    yield "|---|---|---|--:|--:|---|"
    yield from _by_source(result)
    if result.reasons:
        yield ""
        yield "Not covered: " + "; ".join(
            f"{why} ({count})" for why, count in sorted(result.reasons.items())
        )


def _by_source(result: Result) -> Iterable[str]:
    """A line per configuration: the median error of its releases."""
    groups: dict[tuple[str, ...], list[Judged]] = {}
    for one in (*result.fitted, *result.held):
        key = (*group_of(one.run), one.run.split, _dispatched(one.run), str(one.run.expert))
        groups.setdefault(key, []).append(one)
    for (stack, model, gpu, precision, split, way, expert), found in sorted(groups.items()):
        errors = [one.error for one in found]
        ends = " to ".join(map(signed_percent, (min(errors), max(errors))))
        spread = f" ({ends})" if len(errors) > 1 else ""
        yield (
            f"| {stack}, {model}, {gpu} | {precision}, {expert} | {split} | {len(found)} | "
            f"{signed_percent(float(np.median(errors)))}{spread} | {way} |"
        )


def _dispatched(run: Published) -> str:
    settings = run.settings
    assert settings is not None
    overlapped = ", overlapped" if settings.overlapped else ""
    return f"{settings.dispatcher}{overlapped}; {settings.routing}"


def write(text: str, begin: str = BEGIN, end: str = END) -> None:
    """Put a text between two marks of the page, by default those of the results."""
    page = PAGE.read_text(encoding="utf-8")
    head, rest = page.split(begin)
    PAGE.write_text(f"{head}{begin}\n{text}\n{end}{rest.split(end)[1]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--held-out", action="store_true", help="judge the rows held out")
    parser.add_argument("--write", action="store_true", help="write docs/accuracy-experts.md")
    options = parser.parse_args()
    text = "\n".join(lines(study(held_out=options.held_out)))
    if options.write:
        write(text)
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    main()
