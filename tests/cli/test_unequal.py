"""Unequal parts on the command line: planned, estimated, and refused where they are not known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardwise.spec.run import read_run
from tests.command import shardwise

MIXED = "1x8xH100-SXM + 1x8xA100-80GB@200Gbps"
QUESTION = ("--model", "llama-3.2-1b", "--global-batch", "1Mi")


def test_a_plan_is_written_and_estimated_alike(tmp_path: Path) -> None:
    words = ("plan", *QUESTION, "--cluster", MIXED, "-o", "run.toml", "--json")
    done = shardwise(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)
    shares = read_run(tmp_path / "run.toml").strategy.shares
    assert shares is not None
    assert shares[0].accumulate > shares[1].accumulate
    done = shardwise("estimate", "run.toml", "--json", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == planned["profile"]
    assert [part["accumulate"] for part in found["parts"]] == [s.accumulate for s in shares]


def test_parts_that_cannot_pay_exit_with_1(tmp_path: Path) -> None:
    slow = MIXED.replace("200Gbps", "1Gbps")
    done = shardwise("plan", *QUESTION, "--cluster", slow, folder=tmp_path)
    assert done.returncode == 1
    assert "--cluster 1x8xH100-SXM" in " ".join(done.stdout.split())


REFUSED = [
    ("plan", *QUESTION, "--price", "2"),
    ("plan", *QUESTION, "--offload"),
    ("whatif", *QUESTION, "--vary", "network=100"),
    ("estimate", *QUESTION, "--nnodes", "1:2"),
    ("estimate", *QUESTION, "--measured", "3s"),
]


@pytest.mark.parametrize("words", REFUSED, ids=lambda words: f"{words[0]} {words[5]}")
def test_what_is_not_known_is_refused(tmp_path: Path, words: tuple[str, ...]) -> None:
    done = shardwise(*words, "--cluster", MIXED, folder=tmp_path)
    assert done.returncode == 2, done.stdout
    assert "equal" in done.stderr
