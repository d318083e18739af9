"""`shardwise compare` and `tune` refuse what they cannot run before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command import refusal
from tests.distributed.runs import write


@pytest.mark.parametrize(
    ("command", "words", "named"),
    [
        ("compare", ["--strategies", "ddp"], "--strategies ddp,zero3"),
        ("compare", ["--strategies", "ddp,zeroo3"], "zero3"),
        ("compare", ["--csv", "--json"], "--json and --csv"),
        ("tune", ["--batches", "1,a"], "1,2,4"),
        ("tune", ["--batches", "0"], "1,2,4"),
        ("tune", ["--strategies", "zeroo3"], "zero3"),
        ("tune", ["--strategies", ","], "--strategies zero2,zero3"),
        ("tune", ["-o", "missing/best.toml"], "missing"),
    ],
)
def test_wrong_input_is_one_sentence_before_anything_runs(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    words: list[str],
    named: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (sentence,) = refusal(command, str(write(tmp_path, steps=40)), *words)
    assert named in sentence
    assert not (tmp_path / "runs").exists()
