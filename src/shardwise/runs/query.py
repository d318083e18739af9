"""Choose and sort runs: conditions such as `loss<2.5`, `model=llama*`, `train.seed=0`."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from shardwise.runs.record import RunRecord, Value
from shardwise.spec.record import Problems, SpecError, did_you_mean

_CONDITION = re.compile(r"\s*([\w.]+)\s*(<=|>=|!=|=|<|>)\s*(.*?)\s*")
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


class Condition(NamedTuple):
    """A key, an operator and a value; texts may have the wildcards of file names."""

    key: str
    operator: str
    value: str

    def holds(self, run: RunRecord) -> bool:
        """Whether the run meets the condition; False if it has no value of that key."""
        found = run.flat().get(self.key)
        if found is None:
            return False
        if self.operator in _ORDER:
            number = _number(found)
            return number is not None and _ORDER[self.operator](number, float(self.value))
        return _equal(found, self.value) == (self.operator == "=")


def read_conditions(texts: Iterable[str]) -> list[Condition]:
    """Parse conditions; raise one SpecError for all that cannot be read."""
    conditions, problems = [], Problems()
    for text in texts:
        with problems.collect():
            conditions.append(_condition(text))
    problems.raise_if_any()
    return conditions


def _condition(text: str) -> Condition:
    """Parse a condition; raise SpecError if it cannot be read."""
    match = _CONDITION.fullmatch(text)
    if match is None:
        raise SpecError(f"--where: cannot read {text[:60]!r}; write a condition such as 'loss<2.5'")
    condition = Condition(*match.groups())
    if condition.operator in _ORDER and _number(condition.value) is None:
        raise SpecError(f"--where: {condition.value[:60]!r} in {text[:60]!r} is not a number")
    return condition


def check_keys(option: str, keys: Iterable[str], runs: Sequence[RunRecord]) -> None:
    """Raise SpecError for keys that no run has."""
    known = list(dict.fromkeys(key for run in runs for key in run.flat()))
    problems = [
        f"{option}: no run has {key[:60]!r}{did_you_mean(key, known) or '; --json shows every key'}"
        for key in keys
        if key not in known
    ]
    if problems:
        raise SpecError(problems)


def sort_runs(runs: Sequence[RunRecord], key: str) -> list[RunRecord]:
    """Sort by a key, the smallest first; with a minus before it, the largest first.

    Runs without that value come last.
    """
    name = key.removeprefix("-")
    have = [run for run in runs if name in run.flat()]
    ordered = sorted(have, key=lambda run: _rank(run.flat()[name]), reverse=key.startswith("-"))
    return [*ordered, *(run for run in runs if name not in run.flat())]


def _rank(value: Value) -> tuple[bool, float, str]:
    """A sort key that puts numbers before texts."""
    number = _number(value)
    return (True, 0.0, str(value)) if number is None else (False, number, "")


def _equal(found: Value, wanted: str) -> bool:
    """Whether a value equals the wanted number or matches the wanted text with wildcards."""
    if isinstance(found, bool):
        return str(found).lower() == wanted.lower()
    number = _number(wanted)
    if number is not None and not isinstance(found, str):
        return float(found) == number
    return fnmatchcase(str(found), wanted)


def _number(value: Value) -> float | None:
    """The value as a number; None if it is none."""
    try:
        return float(value)
    except ValueError:
        return None
