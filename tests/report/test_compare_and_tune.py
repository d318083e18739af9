"""The results of `compare` and `tune`: rankings as data, screens as golden files."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.report.compare_strategies import print_scores, scores_table
from shardwise.report.table import csv_text, markdown_text
from shardwise.report.tune import print_tuned
from shardwise.trials.calibrate.tune import Candidate, Probe, TuneResult
from shardwise.trials.compare_strategies import Score, ranking
from tests.calibrate.known import observed
from tests.screens import assert_screen
from tests.tables import csv_rows, markdown_rows

TOKENS = 4096


def score(name: str, *steps: float, predicted: float | None = None) -> Score:
    middle = sorted(steps)[len(steps) // 2] if steps else None
    speed = TOKENS / middle if middle else None
    failures = [] if steps else ["RuntimeError: CUDA out of memory"] * 3
    return Score(name, list(steps), speed, predicted, 3 * 2**28 if steps else None, 0, failures)


FAST = score("zero2", 1.0, 1.05, 1.1, predicted=1.071)
NEAR = score("zero3", 1.08, 1.2, 1.3, predicted=1.2)
SLOW = score("ddp", 1.5, 1.575, 1.6, predicted=1.3)
BROKEN = score("zero3:3")
SCORES = [FAST, NEAR, SLOW, BROKEN]


def test_rounds_that_overlap_are_too_close_to_call() -> None:
    found = ranking(SCORES)
    assert found is not None
    assert (found.fastest, found.too_close, found.next) == (FAST, [NEAR], SLOW)
    assert found.next_slower_by == pytest.approx(1.575 / 1.05 - 1)
    alone = ranking([FAST, BROKEN])
    assert alone is not None
    assert (alone.fastest, alone.too_close, alone.next) == (FAST, [], None)
    assert ranking([BROKEN]) is None


def test_compare_screen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_scores(SCORES, rounds=3)
    print_scores([FAST, SLOW], rounds=1)
    print_scores([BROKEN], rounds=3)
    assert_screen("compare", capsys.readouterr().out)


def test_compare_as_csv_and_markdown_agree_with_the_json() -> None:
    table = scores_table(SCORES)
    rows, shown = csv_rows(csv_text(table)), markdown_rows(markdown_text(table))
    for row, text, one in zip(rows, shown, SCORES, strict=True):
        known = one.to_dict()
        for key in ("median_s", "tokens_per_s", "predicted_s"):
            assert row[key] == ("" if known[key] is None else str(known[key]))
        assert text["strategy"] == row["name"] == known["name"]
        assert int(row["failed_rounds"]) == len(known["failures"])
        if known["step_s"]:
            assert float(row["slowest_s"]) == max(known["step_s"])
            assert float(row["error"]) == pytest.approx(
                known["predicted_s"] / known["median_s"] - 1
            )
            assert text["step"] == f"{known['median_s']:.2f} s"


def test_tune_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    first, second = (Candidate(f"ddp x{n}", observed("ddp", n).run) for n in (1, 4))
    probes = [
        Probe(second, 0.5, None, "killed: not finished after 600 s"),
        Probe(first, 0.25, 0.2),
    ]
    tuned = TuneResult(probes, "rest is slower", 0.25)
    assert tuned.best is probes[1]
    print_tuned(tuned, 12, Path("tuned.toml"))
    print_tuned(TuneResult(probes[:1], "all probed"), 1, Path("tuned.toml"))
    assert_screen("tune", capsys.readouterr().out)
