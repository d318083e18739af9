"""Run `shardwise calibrate` on the hosts of the lab: compute rate of ranks, rate of links."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.lab.cases import CLUSTER, HOSTS, RANKS_PER_HOST
from benchmarks.lab.launch import Launch
from benchmarks.lab.network import BURST_S, hosts
from shardwise.spec.quantity import write_rate

RATE = 1e9
TIMEOUT_S = 600.0


def measure(
    file: Path = CLUSTER, burst_s: float = BURST_S, rate: float = RATE, *, force: bool = False
) -> dict[str, Any]:
    """Write the calibrated cluster to `file`; with `force` also if the measurement is poor."""
    file.parent.mkdir(exist_ok=True)
    per_rank = write_rate(rate / RANKS_PER_HOST / 8)
    words = ["shardwise", "calibrate", "--output", str(file), "--network", per_rank]
    words += ["--force"] if force else []
    with tempfile.TemporaryDirectory() as place, hosts(HOSTS, rate, "machine", burst_s) as made:
        with Launch(made, words, Path(place), RANKS_PER_HOST, {}) as launch:
            if launch.wait(TIMEOUT_S) != 0:
                raise RuntimeError(launch.last_words())
        return {"kind": "measured", "screen": Path(place, "host0.log").read_text()}


def show(result: Mapping[str, Any]) -> None:
    print(result["screen"])
