"""Collectives: calls and bytes of a step, counted and predicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.step.profile import StepProfile, by_operation
from shardwise.trials.accept import workload
from shardwise.trials.accept.line import CheckFailedError, Line, judge, not_run
from shardwise.trials.doctor.check import traffic_difference

if TYPE_CHECKING:
    from shardwise.trials.accept.bench import Bench


def check_collectives(bench: Bench) -> Iterator[Line]:
    """Count the collectives of every layout; calls and bytes must equal the prediction."""
    for name, settings in workload.layouts(bench.machine.processes).items():
        if bench.machine.processes == 1:
            yield not_run(name, "calls and bytes as predicted", "one device sends nothing")
            return
        try:
            trained = bench.trained(name, settings)
        except CheckFailedError as error:
            yield judge(name, "calls and bytes as predicted", "", False, str(error))
            continue
        yield counted_as_predicted(name, trained.predicted, trained.measured)


def counted_as_predicted(what: str, predicted: StepProfile, measured: StepProfile) -> Line:
    """A line that passes if calls and bytes of the collectives of two profiles are equal.

    They are compared by operation, group size and axis.
    """
    expected, seen = by_operation(predicted.traffic), by_operation(measured.traffic)
    calls, size = (sum(one[part] for one in seen.values()) for part in (0, 1))
    return judge(
        what, _words(predicted), _words(measured), expected == seen,
        traffic_difference(expected, seen), calls=calls, bytes=size,
    )  # fmt: skip


def _words(profile: StepProfile) -> str:
    """The total calls and megabytes of a profile's collectives, in words."""
    found = by_operation(profile.traffic).values()
    calls, size = sum(one[0] for one in found), sum(one[1] for one in found)
    return f"{calls} calls, {size / 1e6:,.1f} MB"
