"""`shardwise whatif`: screens, JSON, CSV and Markdown of the same question agree."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.command import refusal, shardwise
from tests.tables import csv_rows, markdown_rows

STUDY = ("--model", "gpt2-xl", "--cluster", "2x8xA100-80GB@100Gbps", "--seq-len", "1024")


def whatif(*words: str) -> subprocess.CompletedProcess[str]:
    return shardwise("whatif", *words)


def test_csv_and_markdown_are_those_of_the_json() -> None:
    words = (*STUDY, "--vary", "device=A100-80GB,MI300X", "--vary", "devices=12,32",
             "--tokens", "10B", "--price", "A100-80GB=1.5,mi300x=3")  # fmt: skip
    found = json.loads(whatif(*words, "--json").stdout)
    points: list[dict[str, Any]] = [
        {"vary": study["vary"], **point} for study in found["studies"] for point in study["points"]
    ]
    assert [point["fits"] for point in points] == [True, True, False, True]
    rows = csv_rows(whatif(*words, "--csv").stdout)
    shown = markdown_rows(whatif(*words, "--markdown").stdout)
    for row, text, point in zip(rows, shown, points, strict=True):
        assert (row["vary"], row["value"]) == (point["vary"], point["value"])
        assert (text["vary"], text["value"]) == (point["vary"], point["value"])
        if not point["fits"]:
            assert row["step_s"] == text["step"] == ""
            continue
        assert float(row["step_s"]) == point["step_s"]
        assert [float(row["step_low_s"]), float(row["step_high_s"])] == point["step_s_interval"]
        assert float(row["tokens_per_s"]) == point["tokens_per_s"]
        assert int(row["needed_bytes"]) == point["needed_bytes"]
        assert row["fitted"] == str(point["fitted"]).lower()
        assert int(row["micro_batch"]) == point["strategy"]["micro_batch"]
        assert text["MFU"] == f"{point['mfu']:.1%}"
        price = {"A100-80GB": 1.5, "MI300X": 3.0}[point["cluster"].split("@")[0].split("x", 2)[2]]
        hours = 10e9 / point["tokens_per_s"] * point["devices"] / 3600
        assert point["cost"]["device_hours"] == pytest.approx(hours)
        assert float(row["money"]) == point["cost"]["money"] == pytest.approx(price * hours)
    for point in points:
        if point["fits"]:
            assert type(point["needed_bytes"]) is type(point["peak_bytes"]) is int


def test_a_deadline_that_no_value_meets() -> None:
    words = (*STUDY, "--vary", "network=100,400", "--tokens", "300B", "--deadline", "10")
    done = whatif(*words, "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert not any(point["in_time"] for point in found["studies"][0]["points"])
    assert found["deadline"]["met"]
    assert found["deadline"]["answer"]["cost"]["seconds"] <= 10 * 86400


@pytest.mark.parametrize(
    ("words", "code", "obstacle"),
    [
        (["--cluster", "8xA100-80GB", "--least", "network", "--for", "mfu=20%"], 0, "no network"),
        (["--cluster", "8xA100-80GB", "--least", "network", "--for", "mfu=90%"], 1, "no network"),
        (["--cluster", "8xA100-80GB", "--least", "devices", "--for", "step=1ms"], 1,
         "network needed"),
    ],
)  # fmt: skip
def test_least_says_what_is_missing(words: list[str], code: int, obstacle: str) -> None:
    done = whatif("--model", "gpt2-xl", "--seq-len", "1024", *words, "--json")
    assert done.returncode == code, done.stderr
    found = json.loads(done.stdout)["least"]
    assert found["met"] == (code == 0)
    assert found["obstacle"] == obstacle
    assert found["best"]["mfu"] > 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--vary", "netwrok=100"], "did you mean 'network'"),
        (["--vary", "network"], "network=100,200,400"),
        (["--vary", "device=H100"], "H100"),
        (["--vary", "devices=12"], "8 or 16"),
        ([], "--vary network=100,200,400"),
        (["--least", "network"], "--for"),
        (["--least", "speed", "--for", "mfu=40%"], "network, memory"),
        (["--least", "network", "--for", "mfu=400%"], "mfu=45%"),
        (["--vary", "network=100", "--price", "cheap"], "--price 2.5"),
        (["--vary", "device=H100-SXM,A100-80GB", "--price", "H100-SXM=2"], "A100-80GB=2.5"),
        (["--vary", "network=100", "--deadline", "3"], "--tokens 1T"),
        (["--vary", "network=100", "--csv", "--markdown"], "--csv and --markdown"),
        (["--vary", "network=100", "--micro-batch", "2"], "--fixed"),
    ],
)
def test_wrong_input_is_one_sentence_that_names_what_to_change(
    words: list[str], named: str
) -> None:
    usual = ["whatif", "--model", "gpt2", "--cluster", "2x8xH100-SXM@400Gbps"]
    (sentence,) = refusal(*usual, *words)
    assert named in sentence


def test_all_problems_are_told_at_once() -> None:
    sentences = refusal("whatif", "--vary", "network", "--vary", "memory", "--price", "-1",
                        "--least", "network", "--for", "mfu=400%")  # fmt: skip
    assert [sentence.split(":")[0] for sentence in sentences] == ["vary", "vary", "price", "for"]
