"""Traces in a run folder: where they are, and which files are traces."""

from __future__ import annotations

from pathlib import Path

TRACES = "traces"
# Analysis of the traces in the same folder.
SUMMARY = "summary.json"


def profiled_windows(traces: Path) -> list[Path]:
    """The folders of the profiled windows of steps, oldest first."""
    windows = [folder for folder in traces.glob("step-*") if folder.is_dir()]
    # Names are padded to six digits; longer ones are later.
    return sorted(windows, key=lambda folder: (len(folder.name), folder.name))


def traces_in(folder: Path) -> list[Path]:
    """Trace files of a folder by name; files still being written start with a dot."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.name.endswith((".json", ".json.gz"))
        and file.name != SUMMARY
        and not file.name.startswith(".")
    )
