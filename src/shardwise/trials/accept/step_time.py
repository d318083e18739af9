"""Step time: measured against the prediction, before and after `shardwise calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from shardwise.predict.api import estimate_run
from shardwise.spec.cluster import ClusterSpec
from shardwise.step.profile import TimeProfile, relative_error
from shardwise.trials.accept import workload
from shardwise.trials.accept.bench import TrainedRun
from shardwise.trials.accept.line import CheckFailedError, Line, judge, not_run
from shardwise.trials.accept.machine import MAX_BUSY

if TYPE_CHECKING:
    from shardwise.trials.accept.bench import Bench

EXPECTED = "most inside"
BEFORE, AFTER = "before calibrate", "after calibrate"
FITTED = "after calibrate --from-run"


class Comparison(NamedTuple):
    """The relative error of one layout: predicted over measured step time, minus 1.

    `inside` says whether the measured time is inside the predicted interval.
    """

    error: float
    inside: bool


def check_step_time(bench: Bench) -> Iterator[Line]:
    """Train every layout once, and compare its step time with three predictions."""
    runs, failures = {}, []
    for name, settings in workload.layouts(bench.machine.processes).items():
        try:
            runs[name] = bench.trained(name, settings)
        except CheckFailedError as error:
            failures.append(str(error))
    for why in failures:
        yield judge(BEFORE, EXPECTED, "", False, why)
    if not runs:
        return
    yield _line_before_calibration(bench, runs)
    try:
        calibrated, busy = bench.calibrated(), bench.busy_share()
    except CheckFailedError as error:
        yield judge(AFTER, EXPECTED, "", False, str(error))
        return
    busy = max(busy, *(one.busy for one in runs.values()))
    yield _line(AFTER, runs, lambda name: predicted_on(runs[name], calibrated), busy)
    yield _line_after_calibration(runs, calibrated, busy)


def _line_before_calibration(bench: Bench, runs: Mapping[str, TrainedRun]) -> Line:
    """The line on predictions from the catalogue; not run if it lacks the device."""
    if bench.machine.is_cpu:
        return not_run(BEFORE, EXPECTED, "the catalogue has no step times of CPUs")
    if bench.machine.known is None:
        device = bench.machine.device
        return not_run(BEFORE, EXPECTED, f"the catalogue has no {device}; name one with --device")
    busy = max(one.busy for one in runs.values())
    return _line(BEFORE, runs, lambda name: runs[name].predicted.time, busy)


def predicted_on(trained: TrainedRun, cluster: ClusterSpec) -> TimeProfile | None:
    """The step time of a trained run as predicted for `cluster`; None without a prediction."""
    return estimate_run(trained.run._replace(cluster=cluster)).time


def _line_after_calibration(
    runs: Mapping[str, TrainedRun], calibrated: ClusterSpec, busy: float
) -> Line:
    """The line on predictions for each layout from coefficients fitted to the others only."""
    import importlib.util

    if importlib.util.find_spec("scipy") is None:
        return not_run(FITTED, EXPECTED, "needs scipy: pip install shardwise[calibrate]")
    if len(runs) < 3:
        return not_run(FITTED, EXPECTED, "needs at least 3 layouts, so at least 2 devices")
    from shardwise.observe.observation import Observation, units_of
    from shardwise.trials.calibrate.fit import fit

    seen = {
        name: Observation(one.run, units_of(one.run), _measured_s(one), None, None)
        for name, one in runs.items()
    }

    def predict(name: str) -> TimeProfile | None:
        others = [one for key, one in seen.items() if key != name]
        found = fit(others, lambda _: calibrated).calibration
        return predicted_on(runs[name], calibrated.but(calibration=found))

    return _line(FITTED, runs, predict, busy)


def _line(
    what: str,
    runs: Mapping[str, TrainedRun],
    predict: Callable[[str], TimeProfile | None],
    busy: float,
) -> Line:
    """A line on how many measured step times are inside the predicted interval.

    `predict` returns the prediction of a layout. Not run if `busy`, a share of the cores, is too
    large.
    """
    found = {name: _compare(predict(name), _measured_s(one)) for name, one in runs.items()}
    inside = sum(one.inside for one in found.values())
    errors = [one.error for one in found.values()]
    seen = f"{inside} of {len(found)}, error {min(errors):+.0%} to {max(errors):+.0%}"
    figures = {f"error_{name}": one.error for name, one in found.items()}
    if busy > MAX_BUSY:
        why = f"other processes use {busy:.0%} of the cores"
        return not_run(what, EXPECTED, why, seen, **figures)
    reason = f"{len(found) - inside} of {len(found)} layouts are outside"
    return judge(what, EXPECTED, seen, inside * 2 > len(found), reason, **figures)


def _compare(predicted: TimeProfile | None, measured_s: float) -> Comparison:
    """Compare a predicted with a measured step time; raises CheckFailedError without the former."""
    if predicted is None:
        raise CheckFailedError("no step time is predicted for these devices")
    low, high = predicted.step_s_interval or (predicted.step_s, predicted.step_s)
    error = relative_error(predicted.step_s, measured_s) or 0.0
    return Comparison(error, low <= measured_s <= high)


def _measured_s(trained: TrainedRun) -> float:
    if trained.measured.time is None:
        raise CheckFailedError("the run was too short to measure its step time")
    return trained.measured.time.step_s
