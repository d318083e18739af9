"""The checks of `shardwise doctor`, and how they are run one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import NamedTuple, Protocol

from shardwise.trials.accept.bench import Bench
from shardwise.trials.accept.collectives import check_collectives
from shardwise.trials.accept.compiled import check_compiled
from shardwise.trials.accept.line import CheckFailedError, Line, judge
from shardwise.trials.accept.memory import check_memory
from shardwise.trials.accept.overhead import check_overhead
from shardwise.trials.accept.overlap import check_overlap
from shardwise.trials.accept.parity import check_parity
from shardwise.trials.accept.resume import check_resume
from shardwise.trials.accept.step_time import check_step_time

# Yields its lines as soon as they are known.
Check = Callable[[Bench], Iterator[Line]]

CHECKS: dict[str, Check] = {
    "parity": check_parity,
    "collectives": check_collectives,
    "memory": check_memory,
    "time": check_step_time,
    "overlap": check_overlap,
    "overhead": check_overhead,
    "resume": check_resume,
    "compile": check_compiled,
}


class Progress(Protocol):
    """Shows on the screen which check runs, and its lines."""

    def check(self, name: str) -> None: ...

    def line(self, line: Line) -> None: ...


class CompletedCheck(NamedTuple):
    """The lines of one check, and how long it took."""

    name: str
    lines: list[Line]
    seconds: float


def run_check(name: str, check: Check, bench: Bench, deadline_s: float) -> Iterator[Line]:
    """Yield the lines of one check; an exception in it becomes a failed line."""
    bench.deadline = time.monotonic() + deadline_s
    expected = "runs to its end"
    try:
        with closing(check(bench)) as lines:  # type: ignore[type-var]
            yield from lines
    except CheckFailedError as error:
        yield judge(name, expected, "", False, str(error))
    except Exception as error:
        what = " ".join(str(error).split())
        yield judge(name, expected, "", False, f"unexpected {type(error).__name__}: {what}")


def run_checks(
    names: Sequence[str],
    bench: Bench,
    deadline_s: float,
    done: list[CompletedCheck],
    progress: Progress,
    checks: Mapping[str, Check] = CHECKS,
) -> None:
    """Run the checks in order, and append each to `done`, also one that is interrupted."""
    for name in names:
        progress.check(name)
        begin, lines = time.monotonic(), []
        try:
            for line in run_check(name, checks[name], bench, deadline_s):
                lines.append(line)
                progress.line(line)
        finally:
            done.append(CompletedCheck(name, lines, time.monotonic() - begin))
