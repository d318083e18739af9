"""metrics.jsonl across resumes."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
from pathlib import Path

import pytest

pytest.importorskip("torch")

from shardwise.trainer.metrics import JsonLines, TolerantTracker, open_trackers


def steps_after_resume(path: Path, lines: str, completed: int) -> list[tuple[int, float]]:
    path.write_text(lines)
    tracker = JsonLines(path, completed)
    tracker.log(completed + 1, {"loss": -1.0})
    tracker.close()
    rows = map(json.loads, path.read_text().splitlines())
    return [(row["step"], row["loss"]) for row in rows]


def test_steps_that_are_replayed_are_removed_and_a_cut_line_too(tmp_path: Path) -> None:
    text = "".join(json.dumps({"step": n, "loss": n / 10}) + "\n" for n in range(1, 8))
    found = steps_after_resume(tmp_path / "m.jsonl", text + '{"step": 8, "lo', completed=5)
    assert found == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4), (5, 0.5), (6, -1.0)]


def test_a_file_that_counts_from_zero_is_renumbered(tmp_path: Path) -> None:
    """As version 0.1.0 wrote it: after 5 completed steps its last valid line is step 4."""
    text = "".join(json.dumps({"step": n, "loss": n / 10}) + "\n" for n in range(8))
    found = steps_after_resume(tmp_path / "m.jsonl", text, completed=5)
    assert found == [(1, 0.0), (2, 0.1), (3, 0.2), (4, 0.3), (5, 0.4), (6, -1.0)]


def test_a_line_that_cannot_be_written_costs_only_itself(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The system refuses bytes beyond a limit, as on a full disk; part of a line fits."""
    (tracker,) = open_trackers((), tmp_path)
    file = tmp_path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING, "shardwise"):
        tracker.log(1, {"loss": 1.0})
        resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 5, hard))
        try:
            tracker.log(2, {"loss": 2.0})
            tracker.log(3, {"loss": 3.0})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        tracker.log(4, {"loss": 4.0})
    tracker.close()
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 4]
    (said,) = caplog.messages
    assert str(file) in said
    assert os.strerror(errno.EFBIG) in said


def test_a_mistake_in_a_tracker_is_not_hidden(tmp_path: Path) -> None:
    tracker = TolerantTracker(JsonLines(tmp_path / "m.jsonl"), "m.jsonl")
    with pytest.raises(TypeError):
        tracker.log(1, {"loss": "high"})  # type: ignore[dict-item]
