"""Traces and metrics in a run folder: where they are, and which files are traces."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from statistics import median

from shardwise.spec.read_file import parse_json, read_bytes
from shardwise.spec.record import SpecError

TRACES = "traces"
# File with the analysis of the traces in the same folder.
SUMMARY = "summary.json"
METRICS = "metrics.jsonl"
_MOST_METRICS_BYTES = 64 * 2**20


def profiled_windows(traces: Path) -> list[Path]:
    """Folders of profiled windows of steps in the folder `traces`, oldest first."""
    windows = [folder for folder in traces.glob("step-*") if folder.is_dir()]
    # Names are padded to six digits; longer ones are later.
    return sorted(windows, key=lambda folder: (len(folder.name), folder.name))


def traces_in(folder: Path) -> list[Path]:
    """Trace files of a folder, by name; files still being written start with a dot."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.name.endswith((".json", ".json.gz"))
        and file.name != SUMMARY
        and not file.name.startswith(".")
    )


def _last_iteration(folder: Path) -> Path:
    """The last of torchtitan's folders `iteration_N` in a folder; itself if it has none."""
    found = [one for one in folder.glob("iteration_*") if one.is_dir()]
    numbered = {int(number): one for one in found if (number := one.name[10:]).isdecimal()}
    return numbered[max(numbered)] if numbered else folder


def trace_files(given: Iterable[Path]) -> list[Path]:
    """The trace files that `given` refers to.

    A file stands for itself, a folder for the traces in it, and a run folder or torchtitan's
    `profile_traces` for the traces of its last profiled window. Raises SpecError if there are none.
    """
    files: list[Path] = []
    problems: list[str] = []
    for path in given:
        if not path.exists():
            problems.append(f"trace: {path} does not exist; give a trace file or a folder")
        if not path.is_dir():
            files.append(path)
            continue
        windows = profiled_windows(path / TRACES)
        if not windows and (path / "run.toml").is_file():
            problems.append(
                f"trace: the run in {path} was not profiled; run 'shardwise train --profile 3', or "
                "add [train.profile] to its run.toml"
            )
            continue
        inside = traces_in(windows[-1] if windows else _last_iteration(path))
        if not inside:
            problems.append(
                f"trace: {path} has no .json or .json.gz files; write traces with torch.profiler's "
                "export_chrome_trace"
            )
        files += inside
    if problems:
        raise SpecError(problems)
    return files


def logged_values(path: Path, key: str) -> list[tuple[int, float]]:
    """(step, value of `key`) of the lines of a metrics.jsonl that have it, in order.

    Empty if there is no such file.
    """
    if not path.is_file():
        return []
    found: dict[int, float] = {}
    for line in read_bytes(path, "metrics", _MOST_METRICS_BYTES).splitlines():
        try:
            told = parse_json(line, str(path))
            found[int(told["step"])] = float(told[key])
        except (SpecError, KeyError, TypeError, ValueError, OverflowError):
            continue  # a killed run can leave half a line
    # Version 0.1.0 counted steps from 0.
    offset = 1 if 0 in found else 0
    return sorted((step + offset, value) for step, value in found.items())


def logged_rank_load(trace: Path) -> float | None:
    """Tokens of the busiest rank of expert groups over the mean, median of the run's logged steps.

    It is of the least even block. None where `trace` is in no run folder, or nothing was logged.
    """
    window = trace.resolve().parent
    if window.parent.name != TRACES:
        return None
    try:
        logged = logged_values(window.parent.parent / METRICS, "rank_load")
    except SpecError:
        return None  # traces can be explained without
    return median(load for _, load in logged) if logged else None
