"""Traces in a run folder: where they are, and which files are traces."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shardwise.spec.record import SpecError

TRACES = "traces"
# File with the analysis of the traces in the same folder.
SUMMARY = "summary.json"


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
