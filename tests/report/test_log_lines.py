"""Log lines of a run: whole when piped, cut to a terminal; and the curve of losses at its end."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from shardwise.report.train import TrainScreen
from shardwise.report.trend import trend

VALUES = {
    "loss": 2.5,
    "gradient_norm": 0.25,
    "skipped": 0.0,
    "tokens_per_s": 123_456.0,
    "step_s": 0.5,
    "resident_bytes": 1.5 * 2**30,
}


def line_of(*, is_terminal: bool) -> str:
    """The line of a step on a terminal or in a file."""
    shown = TrainScreen()
    shown._out = Console(
        file=StringIO(), force_terminal=is_terminal, color_system=None, highlight=False
    )
    shown.logged(100, VALUES)
    assert isinstance(shown._out.file, StringIO)
    return shown._out.file.getvalue()


@pytest.mark.parametrize("columns", [200, 80, 60, 40, 10])
def test_on_a_terminal_a_line_has_what_fits(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "24")
    line = line_of(is_terminal=True)
    assert line.count("\n") == 1
    fields = line.strip().split("  ")
    step = fields.pop(0)
    assert step.startswith("step")
    whole = ["loss 2.5000", "grad norm 0.250", "123k tokens/s", "500.0 ms/step", "1.5 GiB"]
    assert fields == whole[: len(fields)]
    assert len(line) - 1 <= max(columns, len(step))
    rest = whole[len(fields) :]
    assert not rest or len(line) - 1 + len("  " + rest[0]) > columns


def test_a_piped_line_is_whole_and_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    assert line_of(is_terminal=False) == (
        "step 100/0  loss 2.5000  grad norm 0.250  123,456 tokens/s  500.0 ms/step\n"
    )


def test_a_trend_goes_from_the_lowest_bar_to_the_highest() -> None:
    assert trend([8, 1], 10) == "█▁"
    assert trend([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert trend([7, 7, 0, 0], 2) == "█▁"
    assert trend([1, float("nan"), 1], 5) == "▁▁"
    assert trend([], 5) == ""
