"""The history of benchmarks: what is kept, what is compared, what is flagged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import history
from benchmarks.history import Trend, numbers, trends


def test_every_number_is_kept_under_its_dotted_name() -> None:
    found = {"a": 1, "b": {"c": 2.5, "d": {"e": -3}}, "name": "x", "yes": True, "list": [1, 2]}
    assert dict(numbers(found)) == {"a": 1.0, "b.c": 2.5, "b.d.e": -3.0}


def test_only_runs_of_the_same_machine_are_compared() -> None:
    lines = [
        {"benchmark": "startup", "machine": where, "figures": {"s": value}}
        for where, value in (("here", 1.0), ("elsewhere", 9.0), ("here", 1.1))
    ]
    assert trends(lines, "here") == [Trend("startup", "s", [1.0, 1.1])]


def test_a_value_outside_the_spread_of_earlier_runs_is_flagged() -> None:
    """Median 10, absolute deviations 0, 1, 1, 2, 2 with median 1: 10 ± 3 × 1.4826."""
    earlier = [8.0, 9.0, 10.0, 11.0, 12.0]
    assert Trend("b", "f", [*earlier, 14.0]).spread == pytest.approx((5.5522, 14.4478))
    assert not Trend("b", "f", [*earlier, 14.0]).flagged
    assert Trend("b", "f", [*earlier, 14.5]).flagged
    assert Trend("b", "f", [*earlier, 5.5]).flagged


def test_too_few_runs_have_no_spread() -> None:
    assert Trend("b", "f", [1.0, 1.0, 1.0, 1.0, 99.0]).spread is None


def test_equal_runs_still_allow_two_percent() -> None:
    assert not Trend("b", "f", [100.0] * 5 + [101.9]).flagged
    assert Trend("b", "f", [100.0] * 5 + [102.1]).flagged


def test_a_run_is_appended_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real process prints JSON; its numbers are one line more."""
    (tmp_path / "quick.py").write_text("print('{\"seconds\": 0.5}')")
    monkeypatch.setattr(history, "__file__", str(tmp_path / "history.py"))
    file = tmp_path / "history.jsonl"
    for _ in range(6):
        history.record("quick", file)
    last = json.loads(file.read_text().splitlines()[-1])
    assert (last["benchmark"], last["figures"]) == ("quick", {"seconds": 0.5})
    assert history.show(file) == 0
    changed = {**last, "figures": {"seconds": 0.6}}
    file.write_text(file.read_text() + json.dumps(changed) + "\n")
    assert history.show(file) == 1
    assert "OUT OF SPREAD" in capsys.readouterr().out
