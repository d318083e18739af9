"""Measured rate of links against their set rate, by TCP transfers of one second each."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.lab.network import hosts, set_rate
from benchmarks.lab.transfer import transfer_rate, transfer_rates

RATES: tuple[float | None, ...] = (250e6, 500e6, 1e9, 2e9, 4e9, 8e9, None)
TIMES = 5


def measure() -> dict[str, Any]:
    rows = []
    with hosts(2, None, "rates") as made:
        sender, receiver = made
        for rate in RATES:
            set_rate(made, rate)
            found = transfer_rates(sender, receiver, times=TIMES)
            rows.append(
                {
                    "set": rate,
                    "median": statistics.median(found),
                    "lowest": min(found),
                    "highest": max(found),
                }
            )
        set_rate(made, 250e6)
        local = transfer_rate(sender, sender)
    control = Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    return {
        "congestion_control": control,
        "bits_per_s": rows,
        "inside_a_host_bits_per_s": local,
    }


def show(result: Mapping[str, Any]) -> None:
    print(f"payload in Mbit/s, measured ({TIMES} transfers, {result['congestion_control']})")
    print(f"{'set':>10}{'median':>10}{'lowest':>10}{'highest':>10}{'of set':>9}")
    for row in result["bits_per_s"]:
        limit = row["set"]
        shown = "none" if limit is None else f"{limit / 1e6:.0f}"
        share = "" if limit is None else f"{row['median'] / limit:.1%}"
        numbers = "".join(f"{row[key] / 1e6:10.0f}" for key in ("median", "lowest", "highest"))
        print(f"{shown:>10}{numbers}{share:>9}")
    local = result["inside_a_host_bits_per_s"] / 1e6
    print(f"inside a host, its link set to 250: {local:.0f}")
