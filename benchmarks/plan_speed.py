"""Speed of the simulator, and time of a plan from start to answer.

    python benchmarks/plan_speed.py [--json]

A simulation is one full step of one configuration, priced and scheduled, on one core. A plan is a
complete command in a new interpreter; the median of several runs is printed, of the time on the
clock and of the CPU time, which a busy machine moves less.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from shardwise.planning.batches import Batch
from shardwise.planning.rows import Rows
from shardwise.planning.space import RECOMPUTE, placements
from shardwise.predict.kernels import coefficients_for, hardware_of
from shardwise.predict.time import times_of
from shardwise.spec.lookup import find_cluster, find_model
from shardwise.spec.strategy import Strategy
from shardwise.units.load import load_units

SHARDWISE = str(Path(sys.executable).with_name("shardwise"))
PLANS = {
    "8b_64": ("llama-3.1-8b", "8x8xH100-SXM@400Gbps"),
    "70b_512": ("llama-3-70b", "64x8xH100-SXM@400Gbps"),
    "405b_16384": ("llama-3.1-405b", "2048x8xH100-SXM@400Gbps"),
}


def simulations_per_s(model: str, rounds: int) -> float:
    """Simulated steps per second over all sharded placements, batches and recompute policies.

    The best of several rounds.
    """
    cluster = find_cluster("64x8xH100-SXM@400Gbps")
    base = Strategy(kind="zero3")
    chosen = [s for s in placements(cluster, base, False) if s.sharded]
    rows = Rows.product(chosen, [Batch(size, 1) for size in (1, 2, 3, 4, 6, 8)], RECOMPUTE)
    units = load_units(find_model(model), 4096, base)
    k, hardware = coefficients_for(cluster), hardware_of(cluster, "bf16")
    assert k is not None
    assert hardware is not None
    best = 0.0
    for _ in range(rounds):
        start = time.perf_counter()
        done = times_of(units, rows.columns, hardware, k)
        assert np.isfinite(done.step_s).all()
        best = max(best, len(rows.which) / (time.perf_counter() - start))
    return best


def plan_s(model: str, cluster: str, rounds: int) -> tuple[float, float]:
    """Seconds on the clock and of CPU time of one plan."""
    command = [SHARDWISE, "plan", "--model", model, "--cluster", cluster]
    wall, cpu = [], []
    for _ in range(rounds):
        start, before = time.perf_counter(), os.times()
        subprocess.run(command, check=True, capture_output=True)
        after = os.times()
        wall.append(time.perf_counter() - start)
        cpu.append(sum(after[2:4]) - sum(before[2:4]))
    return statistics.median(wall), statistics.median(cpu)


def measure(rounds: int) -> dict[str, dict[str, float]]:
    plans = {name: plan_s(*asked, rounds) for name, asked in PLANS.items()}
    return {
        "simulations_per_s": {
            "32_blocks": simulations_per_s("llama-3-8b", rounds),
            "80_blocks": simulations_per_s("llama-3-70b", rounds),
        },
        "plan_s": {name: wall for name, (wall, _) in plans.items()},
        "plan_cpu_s": {name: cpu for name, (_, cpu) in plans.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = measure(options.rounds)
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for name, rate in found["simulations_per_s"].items():
        print(f"{name.replace('_', ' ')}: {rate:,.0f} simulations per second on one core")
    for name, seconds in found["plan_s"].items():
        model, cluster = PLANS[name]
        cpu = found["plan_cpu_s"][name]
        print(f"plan {model} on {cluster}: {seconds:.2f} s, {cpu:.2f} CPU s, start-up included")


if __name__ == "__main__":
    main()
