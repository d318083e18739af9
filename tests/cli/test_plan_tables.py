"""`shardwise plan --csv` and `--markdown`: the figures of the JSON of the same plan."""

from __future__ import annotations

import json

import pytest

from tests.command import refusal, shardwise
from tests.tables import csv_rows, markdown_rows

PLAN = ("plan", "--model", "gpt2-xl", "--cluster", "8xA100-80GB", "--seq-len", "1024",
        "--tokens", "10B", "--price", "a100-80gb=1.5")  # fmt: skip


def test_layouts_are_those_of_the_json() -> None:
    found = json.loads(shardwise(*PLAN, "--json").stdout)
    rows = csv_rows(shardwise(*PLAN, "--csv").stdout)
    shown = markdown_rows(shardwise(*PLAN, "--markdown").stdout)
    by_speed = {row["tokens_per_s"]: row for row in rows if row["tokens_per_s"]}
    ranked = [row for row in rows if row["rank"].isdigit()]
    assert len(ranked) == min(5, len(found["layouts"]))
    for known in found["layouts"]:
        row = by_speed.get(str(known["tokens_per_s"]))
        if row is None:
            continue
        assert float(row["step_s"]) == known["step_s"]
        assert float(row["mfu"]) == known["mfu"]
        assert int(row["needed_bytes"]) == known["needed_bytes"]
        assert int(row["micro_batch"]) == known["strategy"]["micro_batch"]
        hours = 10e9 / known["tokens_per_s"] * 8 / 3600
        assert float(row["device_hours"]) == pytest.approx(hours)
        assert float(row["money"]) == pytest.approx(1.5 * hours)
    winner = found["winner"]
    assert float(ranked[0]["tokens_per_s"]) == winner["tokens_per_s"]
    assert float(ranked[0]["money"]) == pytest.approx(found["cost"]["money"])
    # A star marks layouts with settings that are named below the table.
    assert [text["layout"].rstrip("*") for text in shown] == [row["layout"] for row in rows]
    assert shown[0]["GiB"] == f"{winner['needed_bytes'] / 2**30:,.1f}"


def test_money_prints_the_cost_of_every_size() -> None:
    words = (*PLAN, "--objective", "money")
    sizes = json.loads(shardwise(*words, "--json").stdout)["size"]["sizes"]
    rows = csv_rows(shardwise(*words, "--csv").stdout)
    assert [int(row["devices"]) for row in rows] == [size["devices"] for size in sizes]
    assert [float(row["money"]) for row in rows] == [size["money"] for size in sizes]


def test_formats_exclude_each_other() -> None:
    (sentence,) = refusal(*PLAN, "--csv", "--markdown")
    assert "--csv and --markdown" in sentence
