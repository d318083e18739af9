"""Where the folder of a run keeps its traces."""

from __future__ import annotations

from pathlib import Path

TRACES = "traces"


def profiled_moments(traces: Path) -> list[Path]:
    """Of a run's folder of traces, a folder for every profiled moment, the last one last."""
    moments = [folder for folder in traces.glob("step-*") if folder.is_dir()]
    # Numbers of more than six digits are longer, and later.
    return sorted(moments, key=lambda folder: (len(folder.name), folder.name))
