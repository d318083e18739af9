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
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shardwise.planning.batches import Batch
from shardwise.planning.degrees import of_groups
from shardwise.planning.layout import Degrees
from shardwise.planning.placed import Forms
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
    "deepseek_256": ("deepseek-v3", "32x8xB200@400Gbps"),
    "deepseek_2048": ("deepseek-v3", "256x8xH100-SXM@400Gbps"),
    "qwen3_235b_64": ("qwen3-235b-a22b", "8x8xH100-SXM@400Gbps"),
    "gpt_oss_16": ("gpt-oss-120b", "2x8xB200@400Gbps"),
}
# The layouts of DeepSeek-V3 on 2,048 devices if pipelines were planned too.
LAYOUTS = 28_928


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


def place_layouts(layouts: int) -> tuple[int, float]:
    """At least this many layouts placed as columns, and the seconds of CPU that this took.

    Of 262,144 devices and fewer, with every degree of tensor, context and expert parallelism that
    is a power of two.
    """
    base, forms, placed, start = Strategy(kind="zero3"), Forms(), 0, time.process_time()
    for nodes in (2**power for power in range(15, 2, -1)):
        cluster = find_cluster(f"{nodes}x8xH100-SXM@400Gbps")
        for degrees in _degrees(cluster.devices):
            groups = of_groups(cluster, degrees.inner)
            found = placements(groups, base, True, degrees=degrees, forms=forms)
            placed += len({found.layout(row) for row in range(len(found))})
            assert len(found) == len(found.columns)
            if placed >= layouts:
                return placed, time.process_time() - start
    raise AssertionError(f"there are only {placed:,} layouts")


def _degrees(devices: int) -> Iterator[Degrees]:
    """Degrees of tensor, context and expert parallelism of so many devices."""
    context = [2**power for power in range(devices.bit_length() - 4)]
    for one in context:
        for tensor in (1, 2, 4, 8):
            yield Degrees(tensor, one)
        for expert in (2, 4, 8, 16, 32, 64, 128, 256):
            yield Degrees(1, one, expert=expert)


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
    layouts, seconds = place_layouts(LAYOUTS)
    return {
        "placed": {"layouts": layouts, "cpu_s": seconds},
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
    print(f"{found['placed']['layouts']:,} layouts placed in {found['placed']['cpu_s']:.2f} CPU s")
    for name, seconds in found["plan_s"].items():
        model, cluster = PLANS[name]
        cpu = found["plan_cpu_s"][name]
        print(f"plan {model} on {cluster}: {seconds:.2f} s, {cpu:.2f} CPU s, start-up included")


if __name__ == "__main__":
    main()
