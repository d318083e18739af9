"""Step time of ddp, zero2 and zero3 on two hosts, with unlimited links and with 1 Gbit/s.

A Llama of 17 million parameters, 68 MB in fp32, one rank per host. Each round runs every strategy
once at every rate, so that other load on the machine affects all of them alike.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.lab.network import hosts, set_rate
from benchmarks.lab.session import Session

KINDS = ("ddp", "zero2", "zero3")
RATES: tuple[float | None, ...] = (None, 1e9)
ROUNDS, STEPS = 3, 8
# The first steps of a job allocate and, with ddp, choose buckets.
WARM_UP = 2
MODEL = {"layers": 4, "hidden": 512, "heads": 8, "ffn": 1408, "vocab": 4096}
SEQ_LEN, MICRO_BATCH = 128, 2


def write_run_toml(
    file: Path,
    strategy: Mapping[str, Any],
    nodes: int,
    devices_per_node: int,
    rate_bits_per_s: float | None,
    train: Mapping[str, Any],
    model: Mapping[str, Any] = MODEL,
    seq_len: int = SEQ_LEN,
) -> Path:
    """Write a run.toml for a Llama of these sizes, in fp32 unless the strategy says otherwise."""
    import tomli_w

    network = f"@{rate_bits_per_s / 1e6:g}Mbps" if rate_bits_per_s else ""
    run = {
        "cluster": f"{nodes}x{devices_per_node}xCPU{network}",
        "model": {"name": "lab", "family": "llama", "max_positions": seq_len, **model},
        "job": {"seq_len": seq_len},
        "strategy": {"param_dtype": "fp32", "micro_batch": MICRO_BATCH, **strategy},
        "train": {"measure": False, **train},
    }
    file.write_text(tomli_w.dumps(run))
    return file


def measure(rounds: int = ROUNDS) -> dict[str, Any]:
    step_s: dict[tuple[str, str], list[float]] = {}
    job_s: list[float] = []
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as place, hosts(2, None, "baseline") as made:
        folder = Path(place)
        with Session(made, 1, folder / "session") as session:
            start_s = time.monotonic() - begin
            for number in range(rounds):
                for rate in RATES:
                    set_rate(made, rate)
                    for kind in KINDS:
                        train = {"steps": STEPS, "log_every": STEPS}
                        toml = folder / f"{kind}.toml"
                        write_run_toml(toml, {"kind": kind}, 2, 1, rate, train)
                        where = folder / f"{number}-{name_of(rate)}-{kind}"
                        outcome = session.run(toml, where)
                        if not outcome.ok:
                            raise RuntimeError(outcome.error)
                        taken = step_s.setdefault((name_of(rate), kind), [])
                        taken += outcome.step_s[WARM_UP:]
                        # Time of a job outside its steps.
                        job_s.append(outcome.wall_s - sum(outcome.step_s))
    return {
        "parameters_bytes": parameters_bytes(),
        "rounds": rounds,
        "session_start_s": start_s,
        "job_overhead_s": statistics.median(job_s),
        "cells": [
            {"rate": rate, "strategy": kind, **spread(taken)}
            for (rate, kind), taken in step_s.items()
        ],
    }


def spread(taken: list[float]) -> dict[str, float]:
    ordered = sorted(taken)
    last = len(ordered) - 1
    return {
        "steps": len(ordered),
        "median_s": statistics.median(ordered),
        "p10_s": ordered[round(0.1 * last)],
        "p90_s": ordered[round(0.9 * last)],
    }


def parameters_bytes() -> int:
    layers, hidden, ffn, vocab = (MODEL[key] for key in ("layers", "hidden", "ffn", "vocab"))
    block = 4 * hidden**2 + 3 * hidden * ffn + 2 * hidden
    return 4 * (layers * block + 2 * vocab * hidden + hidden)


def name_of(rate: float | None) -> str:
    return "unlimited" if rate is None else f"{rate / 1e9:g} Gbit/s"


def show(result: Mapping[str, Any]) -> None:
    print(
        f"{result['parameters_bytes'] / 1e6:.0f} MB of parameters, 2 hosts x 1 rank, measured: "
        "ms per step, median (10 % to 90 %)"
    )
    print(f"{'':12}" + "".join(f"{kind:>26}" for kind in KINDS))
    for rate in map(name_of, RATES):
        cells = [cell for cell in result["cells"] if cell["rate"] == rate]
        texts = [
            f"{c['median_s'] * 1e3:.0f} ({c['p10_s'] * 1e3:.0f} to {c['p90_s'] * 1e3:.0f})"
            for c in cells
        ]
        print(f"{rate:12}" + "".join(f"{text:>26}" for text in texts))
    print(
        f"session start: {result['session_start_s']:.1f} s; overhead per job: "
        f"{result['job_overhead_s']:.2f} s"
    )
