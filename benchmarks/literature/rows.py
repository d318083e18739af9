"""Published figures and our predictions of them, one row each.

figures.csv has the rows: source, where the figure stands, what it is, its unit, whether it was
measured or derived, the figure, and what predicts it: commands and a quantity, or a formula and its
arguments. sources.toml has the sources and where their text was read.
"""

from __future__ import annotations

import csv
import tomllib
from pathlib import Path
from typing import Literal, NamedTuple

from benchmarks.literature.estimates import OF_ONE, OF_TWO
from benchmarks.literature.formulas import FORMULAS

HERE = Path(__file__).resolve().parent
# Errors up to this size need no reason.
NEAR = 0.15


class Source(NamedTuple):
    key: str
    title: str
    url: str
    # Where its figures were read.
    read: str
    # What its replay shows.
    note: str


class Row(NamedTuple):
    """One published figure: a number, or a verdict on memory. `how` is empty if not predicted."""

    source: str
    where: str
    what: str
    unit: str
    basis: Literal["measured", "derived", "estimated"]
    published: float | str
    how: str
    predicted: float | str | None
    why: str

    @property
    def error(self) -> float | None:
        """Relative; None of verdicts and of what is not predicted."""
        if isinstance(self.predicted, float) and isinstance(self.published, float):
            return self.predicted / self.published - 1
        return None

    @property
    def near(self) -> bool:
        if self.error is None:
            return self.predicted == self.published
        return abs(self.error) <= NEAR


def read_sources() -> list[Source]:
    text = (HERE / "sources.toml").read_text(encoding="utf-8")
    return [Source(**one) for one in tomllib.loads(text)["source"]]


def read_rows(basis: tuple[str, ...] = ("measured", "derived", "estimated")) -> list[Row]:
    """The rows of these kinds, predicted."""
    with (HERE / "figures.csv").open(encoding="utf-8", newline="") as file:
        return [_row(row) for row in csv.DictReader(file) if row["basis"] in basis]


def _row(row: dict[str, str]) -> Row:
    quantity, of = row["quantity"], row["of"]
    return Row(
        source=row["source"],
        where=row["where"],
        what=row["what"],
        unit=row["unit"],
        basis=row["basis"],  # type: ignore[arg-type]
        published=_number(row["published"]),
        how=of and f"{quantity} of {of}",
        predicted=predict(quantity, of) if of else None,
        why=row["why"],
    )


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


def predict(quantity: str, of: str) -> float | str:
    """A quantity, perhaps with a factor, of a formula's arguments or of commands."""
    factor, _, name = quantity.rpartition(" * ")
    if name in FORMULAS:
        found: float | str = FORMULAS[name](**_arguments(of))
    elif name in OF_TWO:
        found = OF_TWO[name](of.split(" | "))
    else:
        found = OF_ONE[name](of)
    return found if isinstance(found, str) else float(factor or 1) * found


def _arguments(of: str) -> dict[str, float]:
    pairs = (word.split("=") for word in of.split())
    return {name: float(value) for name, value in pairs}
