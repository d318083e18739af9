"""One line of the acceptance table: what was checked, expected and seen, and the verdict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Verdict = Literal["ok", "failed", "not run"]


class Line(NamedTuple):
    """A result of a check. `reason` says why it failed or was not run.

    `figures` are the numbers behind `seen`, in units that their names say.
    """

    what: str
    expected: str
    seen: str
    verdict: Verdict
    reason: str = ""
    figures: Mapping[str, float] = {}

    def to_dict(self) -> dict[str, Any]:
        """The line as the result file has it; empty fields are absent."""
        return {name: value for name, value in self._asdict().items() if value not in ("", {})}


class CheckFailedError(Exception):
    """A check could not finish: a process failed or hung. The message is the reason."""


def judge(
    what: str, expected: str, seen: str, passed: bool, reason: str = "", **figures: float
) -> Line:
    """A line of a check that was run: ok if `passed`, else failed for `reason`."""
    verdict: Verdict = "ok" if passed else "failed"
    return Line(what, expected, seen, verdict, "" if passed else reason, figures)


def not_run(what: str, expected: str, reason: str, seen: str = "", **figures: float) -> Line:
    """A line of a check that was not run, for `reason`. `seen` holds figures that prove nothing."""
    return Line(what, expected, seen, "not run", reason, figures)
