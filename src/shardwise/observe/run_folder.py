"""Where the folder of a run keeps its traces, and which files of a folder are traces."""

from __future__ import annotations

from pathlib import Path

TRACES = "traces"
# What was found in the traces beside it.
SUMMARY = "summary.json"


def profiled_moments(traces: Path) -> list[Path]:
    """Of a run's folder of traces, a folder for every profiled moment, the last one last."""
    moments = [folder for folder in traces.glob("step-*") if folder.is_dir()]
    # Numbers of more than six digits are longer, and later.
    return sorted(moments, key=lambda folder: (len(folder.name), folder.name))


def traces_in(folder: Path) -> list[Path]:
    """Files that may be traces, by their names; one that is still being written has a dot."""
    return sorted(
        file
        for file in folder.iterdir()
        if file.name.endswith((".json", ".json.gz"))
        and file.name != SUMMARY
        and not file.name.startswith(".")
    )
