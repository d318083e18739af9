"""Memory: allocated and reserved bytes at the peak of a step, measured and predicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.step.profile import relative_error
from shardwise.trials.accept import workload
from shardwise.trials.accept.bench import TrainedRun
from shardwise.trials.accept.line import CheckFailedError, Line, judge, not_run

if TYPE_CHECKING:
    from shardwise.trials.accept.bench import Bench

# Largest error of the predicted peak. On CPUs tensors are counted one by one. A GPU's allocator
# rounds them up, and libraries allocate workspaces of their own.
MAX_ERROR_ON_CPU, MAX_ERROR_ON_GPU = 0.03, 0.10
ONLY_ON_GPU = "only a GPU's allocator reserves memory"


def check_memory(bench: Bench) -> Iterator[Line]:
    """Compare the measured peak of every layout with its prediction."""
    is_cpu = bench.machine.is_cpu
    limit = MAX_ERROR_ON_CPU if is_cpu else MAX_ERROR_ON_GPU
    for name, settings in workload.layouts(bench.machine.processes).items():
        try:
            trained = bench.trained(name, settings)
        except CheckFailedError as error:
            yield judge(f"{name}, allocated", f"within {limit:.0%}", "", False, str(error))
            continue
        yield _allocated(name, trained, limit)
        if not is_cpu:
            yield _reserved(name, trained)
    if is_cpu:
        yield not_run("reserved", "inside the predicted interval", ONLY_ON_GPU)


def _allocated(name: str, trained: TrainedRun, limit: float) -> Line:
    """The line on allocated bytes; `limit` is the largest relative error of the prediction."""
    what = f"{name}, allocated"
    predicted = trained.predicted.known_memory.peak_allocated_bytes
    expected = f"{_mib(predicted)} ± {limit:.0%}"
    if trained.measured.memory is None:
        return judge(what, expected, "", False, "the run measured no memory")
    peak = trained.measured.memory.peak_allocated_bytes
    error = relative_error(predicted, peak) or 0.0
    seen = f"{_mib(peak)} ({error:+.1%})"
    reason = "the prediction is too low" if error < 0 else "the prediction is too high"
    figures = {"predicted_bytes": predicted, "measured_bytes": peak}
    return judge(what, expected, seen, abs(error) <= limit, reason, **figures)


def _reserved(name: str, trained: TrainedRun) -> Line:
    """The line on reserved bytes, which must be inside the predicted interval."""
    what = f"{name}, reserved"
    interval = trained.predicted.known_memory.peak_reserved_bytes
    measured = trained.measured.memory
    if interval is None or measured is None or measured.peak_reserved_bytes is None:
        return judge(what, "inside the predicted interval", "", False, "no reserved memory known")
    low, high = interval
    peak = measured.peak_reserved_bytes[1]
    reason = "below the interval" if peak < low else "above the interval"
    figures = {"predicted_low_bytes": low, "predicted_high_bytes": high, "measured_bytes": peak}
    return judge(
        what, f"{_mib(low)} to {_mib(high)}", _mib(peak), low <= peak <= high, reason, **figures
    )


def _mib(size: float) -> str:
    return f"{size / 2**20:,.1f} MiB"
