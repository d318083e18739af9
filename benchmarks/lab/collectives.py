"""Latency and rate of collectives over links with a set rate, fitted as `calibrate` does.

The ranks of the measurement also run this module.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lab.cases import HOSTS, RANKS_PER_HOST, save_as
from benchmarks.lab.launch import Launch
from benchmarks.lab.network import hosts, set_rate
from benchmarks.lab.sweep import RATES
from shardwise.engine.mesh import join
from shardwise.launch.environment import end_with_launcher
from shardwise.trials.calibrate.machine.collectives import Collective, groups, measure_collectives

TIMEOUT_S = 600.0


def measure() -> dict[str, Any]:
    rows = []
    with tempfile.TemporaryDirectory() as place, hosts(HOSTS, None, "collectives") as made:
        for rate in RATES:
            set_rate(made, rate)
            out = Path(place, f"{rate:.0f}.json")
            words = ["benchmarks.lab.collectives", str(out)]
            with Launch(made, words, Path(place, "logs"), RANKS_PER_HOST, {}) as launch:
                if launch.wait(TIMEOUT_S) != 0:
                    raise RuntimeError(launch.last_words())
            for row in json.loads(out.read_text()):
                carried = 8 * row["rate"] * _carried(row["operation"], row["place"])
                share = {} if row["place"] == "inside a node" else {"share_of_rate": carried / rate}
                rows.append({"set_bits_per_s": rate, **row, **share})
    limited = [row for row in rows if "share_of_rate" in row]
    result = {
        "kind": "measured",
        "largest_rate_error": max(abs(row["share_of_rate"] - 1) for row in limited),
        "least_r_squared": min(row["r_squared"] for row in limited),
        "collectives": rows,
    }
    save_as("collectives", result)
    return result


def _carried(operation: str, place: str) -> int:
    """Bytes on a host's link, relative to a ring of one group."""
    # Gloo runs a reduce-scatter as an all-reduce; groups between nodes run at the same time.
    passes = 2 if operation == "reduce_scatter" else 1
    return passes * (RANKS_PER_HOST if place == "between nodes" else 1)


def show(result: Mapping[str, Any]) -> None:
    for row in result["collectives"]:
        low, high = (8 * one / 1e6 for one in row["rate_interval"])
        print(f"{row['set_bits_per_s'] / 1e6:6.0f} Mbit/s {row['operation']:>15} {row['place']:14}"
              f"{row['fixed_s'] * 1e3:8.2f} ms {8 * row['rate'] / 1e6:8.0f} Mbit/s "
              f"({low:.0f} to {high:.0f}), R² {row['r_squared']:.4f}"
              + (f", {row['share_of_rate']:.1%} of the link" if "share_of_rate" in row else "")
        )  # fmt: skip
    print(f"limited links: at most {result['largest_rate_error']:.1%} off the set rate, "
          f"R² at least {result['least_r_squared']:.4f}")  # fmt: skip


def main(out: str) -> None:
    end_with_launcher()
    join(torch.device("cpu"))
    torch.set_num_threads(1)
    made = groups()
    found = list(measure_collectives(torch.device("cpu"), made, lambda *_: None))
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps([_row(one) for one in found]))
    dist.destroy_process_group()


def _row(one: Collective) -> dict[str, Any]:
    return {
        "operation": one.operation,
        "place": one.place,
        "members": one.members,
        **one.line._asdict(),
        "messages": [{"bytes": m.size, **m.timing.summary()} for m in one.messages],
    }


if __name__ == "__main__":
    main(sys.argv[1])
