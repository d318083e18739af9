"""What is judged with the catalogue's figures is judged after they were written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from benchmarks import accuracy

WRITTEN = "SHARDWISE_TEST_WRITTEN"


def judged_here() -> dict[str, Any]:
    text = Path(os.environ[WRITTEN]).read_text()
    return {"y2026_memory": {}, "read": text, "process": os.getpid()}


def test_figures_are_read_after_publishing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In another process: this one has read the catalogue as it was before."""
    path = tmp_path / "catalogue"
    path.write_text("old")
    monkeypatch.setenv(WRITTEN, str(path))
    monkeypatch.setattr(accuracy, "fitted", lambda: {"y2026_time": {}, "fitted": "new"})
    monkeypatch.setattr(accuracy, "judged_with_catalogue", judged_here)

    def publish(result: dict[str, Any]) -> None:
        path.write_text(result["fitted"])

    found = accuracy.study(publish)
    assert found["read"] == "new"
    assert found["process"] != os.getpid()
    assert accuracy.study()["read"] == "new"
