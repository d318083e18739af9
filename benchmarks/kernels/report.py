"""Errors of the forms on their own tables, with one source left out at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.kernels.fitting import Numbers
from benchmarks.kernels.study import Skipped, Study

# Median and 90th percentile of the error that families which decide a step should stay below.
GOALS = {"attention": (0.10, 0.25), "matmul": (0.10, 0.25), "collective": (0.10, 0.25)}


class Errors(NamedTuple):
    """|form / measured - 1| of some rows."""

    rows: int
    median: float
    p90: float

    @property
    def text(self) -> str:
        if not self.rows:
            return f"{'one source':>20}"
        return f"{self.rows:6,} {self.median:6.1%} {self.p90:6.1%}"

    @property
    def cells(self) -> str:
        return f"{self.rows:,} | {self.median:.1%} | {self.p90:.1%}"

    def beyond(self, goal: tuple[float, float]) -> bool:
        """Whether there are rows, and they are further off than the goal."""
        return self.rows > 0 and (self.median > goal[0] or self.p90 > goal[1])


def errors(off: Numbers) -> Errors:
    """Errors of ln(measured / form), where it is a number."""
    found = np.abs(np.expm1(-off[np.isfinite(off)]))
    if not len(found):
        return Errors(0, 0.0, 0.0)
    return Errors(len(found), float(np.median(found)), float(np.quantile(found, 0.9)))


def by_family(studies: Sequence[Study]) -> dict[tuple[str, str], list[Study]]:
    """Entries by device and family: narrow formats and prefill of serving engines apart."""
    found: dict[tuple[str, str], list[Study]] = {}
    for study in studies:
        key = study.key
        family = key.family
        if family == "attention":
            family += ", prefill" if key.kernel.endswith("prefill") else ""
        if family.startswith(("attention", "matmul")) and key.dtype != "bf16":
            family += ", fp8 and fp4"
        found.setdefault((key.device, family), []).append(study)
    return dict(sorted(found.items()))


def markdown(studies: Sequence[Study]) -> str:
    """The same table for the page, of families whose sources can be left out."""
    rows = [
        "| device | kernels | fitted | median | 90 % within | left out | median | 90 % within |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for (device, family), mine in by_family(studies).items():
        inside = errors(np.concatenate([study.off for study in mine]))
        out = left_out_errors(mine)
        if out.rows:
            rows.append(f"| {device} | {family} | {inside.cells} | {out.cells} |")
    return "\n".join(rows)


def left_out_errors(studies: Sequence[Study]) -> Errors:
    """Of all entries together, each row without its source."""
    return errors(np.concatenate([study.left_out for study in studies]))


def lines(studies: Sequence[Study], skipped: Sequence[Skipped]) -> Iterator[str]:
    """A row per device and family, what is beyond the goal, and what could not be identified."""
    yield f"{'':61}{'all rows fitted':>20}  {'source left out':>20}"
    head = f"{'rows':>6} {'median':>6} {'p90':>6}"
    yield f"{'device':21}{'family':30}{'entries':>8}  {head}  {head}"
    for (device, family), mine in by_family(studies).items():
        inside = errors(np.concatenate([study.off for study in mine]))
        out = left_out_errors(mine)
        goal = GOALS.get(mine[0].key.family)
        mark = "  beyond" if goal and out.beyond(goal) else ""
        yield f"{device:21}{family:30}{len(mine):8}  {inside.text}  {out.text}{mark}"
    yield "\nEntries beyond 10 % (median) or 25 % (90th percentile) with a source left out:"
    for study in studies:
        goal = GOALS.get(study.key.family)
        if goal and errors(study.left_out).beyond(goal):
            yield f"- {_name(study.key)}: {errors(study.left_out).text.strip()}"
            yield f"  {'; '.join(_by_source(study))}"
    yield "\nNot identified:"
    for one in skipped:
        yield f"- {_name(one.key)}: {one.reason}"


def _by_source(study: Study) -> Iterator[str]:
    """How far the form of the others is off on each source: more is slower than measured."""
    names = np.asarray(study.sources)
    for name in sorted(set(study.sources)):
        off = study.left_out[names == name]
        off = off[np.isfinite(off)]
        if len(off):
            yield f"{name} {np.median(np.expm1(-off)):+.0%}"


def _name(key: tuple[str, str, str, str]) -> str:
    return ", ".join(key)
