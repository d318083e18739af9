"""A plan that misses its deadline: exit 1, and the devices that would meet it."""

from __future__ import annotations

import json

from tests.command import shardwise

PLAN = ("plan", "--model", "llama-3.2-1b", "--seq-len", "2048", "--tokens", "1T")


def test_a_missed_deadline_names_the_devices_that_meet_it() -> None:
    words = (*PLAN, "--cluster", "1x8xH100-SXM@400Gbps")
    first = json.loads(shardwise(*words, "--json").stdout)
    assert "deadline" not in first
    days = first["cost"]["seconds"] / 86400 / 3
    missed = shardwise(*words, "--deadline", f"{days:.3f}", "--json")
    assert missed.returncode == 1, missed.stderr
    found = json.loads(missed.stdout)["deadline"]
    assert found["met"]
    devices = found["answer"]["devices"]
    assert devices >= 3 * 8
    met = shardwise(*PLAN, "--cluster", f"{devices // 8}x8xH100-SXM@400Gbps",
                    "--deadline", f"{days:.3f}")  # fmt: skip
    assert met.returncode == 0, met.stdout


def test_one_node_without_a_network_says_what_is_missing() -> None:
    done = shardwise(*PLAN, "--cluster", "8xH100-SXM", "--deadline", "0.01", "--json")
    assert done.returncode == 1
    found = json.loads(done.stdout)["deadline"]
    assert not found["met"]
    assert found["obstacle"] == "network needed"
