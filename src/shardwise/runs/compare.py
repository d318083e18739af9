"""Compare runs: the settings that differ, and how far and fast each came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from shardwise.runs.record import RunRecord, Value
from shardwise.spec.record import SpecError, did_you_mean
from shardwise.step.comparison import relative_change

# Results in the order of a screen.
RESULTS = (
    *("state", "step", "loss", "eval_loss", "gradient_norm", "step_s", "predicted_step_s"),
    *(
        "tokens_per_s",
        "tokens_per_s_per_device",
        "mfu",
        "peak_bytes",
        "predicted_peak_bytes",
        "recoveries",
    ),
)
# Sections that are compared by the names in _ABOUT instead: many of their settings would differ.
_ABOUT = ("model", "parameters", "cluster", "devices", "version")
_NAMED = ("model.", "cluster.")


class ComparedKey(NamedTuple):
    """A key and its value in each run; None if a run does not have it."""

    key: str
    values: tuple[Value | None, ...]

    @property
    def change(self) -> float | None:
        """The relative change from the first to the second number; None for other values."""
        if len(self.values) != 2:
            return None
        before, after = self.values
        if isinstance(before, str | bool | None) or isinstance(after, str | bool | None):
            return None
        return relative_change(before, after)


class Comparison(NamedTuple):
    """Runs, the settings in which they differ, and their results."""

    runs: list[RunRecord]
    settings: list[ComparedKey]
    results: list[ComparedKey]


def compare_runs(runs: Sequence[RunRecord]) -> Comparison:
    """Compare the settings and the results of runs, from their records."""
    flat = [run.flat() for run in runs]
    settings = (key for one in flat for key in one if "." in key and not key.startswith(_NAMED))
    rows = [_row(key, flat) for key in dict.fromkeys([*_ABOUT, *settings])]
    different = [row for row in rows if len(set(map(repr, row.values))) > 1]
    results = [_row(key, flat) for key in RESULTS]
    known = [row for row in results if any(value is not None for value in row.values)]
    return Comparison(list(runs), different, known)


def choose_runs(runs: Sequence[RunRecord], names: Sequence[str]) -> list[RunRecord]:
    """The runs with these names, in this order; raises SpecError for unknown names."""
    by_name = {run.name: run for run in runs}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise SpecError(
            f"--compare: there is no run {name[:60]!r}{did_you_mean(name, list(by_name))}"
            for name in missing
        )
    return [by_name[name] for name in names]


def _row(key: str, flat: Sequence[dict[str, Value]]) -> ComparedKey:
    return ComparedKey(key, tuple(one.get(key) for one in flat))
