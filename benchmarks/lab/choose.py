"""Regret of `shardwise plan` and of `tune` with a few probes, against the best cell of the sweep.

Both choose the fastest configuration for the sweep's model at every rate. If the plan's choice is
not a cell of the sweep, it is trained together with the best cell that fits.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.lab.calibrated import calibrate
from benchmarks.lab.cases import (
    HOSTS,
    RANKS_PER_HOST,
    SEQ_LEN,
    STRATEGIES,
    WARM_UP,
    Case,
    measure_cases,
    save_as,
)
from benchmarks.lab.network import hosts, set_rate
from benchmarks.lab.session import Session
from benchmarks.lab.sweep import BATCHES, RATES, Cell
from shardwise.observe.observation import Observation
from shardwise.predict.api import estimate_run
from shardwise.spec.calibration import Calibration
from shardwise.spec.lookup import write_cluster
from shardwise.spec.run import read_run
from shardwise.spec.strategy import Strategy
from shardwise.trials.calibrate.tune import Candidate, tune

MOST_PROBES = 5
# The tokens of the larger batch, so that steps are comparable.
TOKENS = max(BATCHES) * SEQ_LEN * HOSTS * RANKS_PER_HOST


class Choice(NamedTuple):
    """The plan's choice at one rate, and the best cell that fits as well."""

    rate: float
    room: str
    strategy: Strategy
    best: Cell
    # The cell with the same configuration; None if the sweep has none.
    same: Cell | None

    @property
    def name(self) -> str:
        return f"{self.rate / 1e6:.0f}Mbit, {self.room}"


# With this many bytes, ddp with the larger batch does not fit.
ROOMS = {"room for all": None, "no room for ddp": 1_810_000_000}


def plan() -> dict[str, Any]:
    """Regret of the plan at every rate; negative if it beats all cells."""
    seen, found = calibrate()
    choices = [
        _choose(rate, room, memory, seen, found.calibration)
        for room, memory in ROOMS.items()
        for rate in RATES
    ]
    # Configurations of the sweep are not trained again.
    cases = []
    for one in choices:
        if one.same is None:
            best = one.best.case._replace(name=f"{one.name}, best cell")
            cases += [Case(one.name, one.rate, _table(one.strategy)), best]
    kept = measure_cases(cases) if cases else {}
    rows: dict[str, dict[str, Any]] = {}
    for one in choices:
        if one.same is not None:
            mine, other = seen[one.same].step_s, seen[one.best].step_s
        else:
            names = (one.name, f"{one.name}, best cell")
            mine, other = (statistics.median(kept[name].step_s) for name in names)
        rows[one.name] = {
            "planned": f"{one.strategy}, {one.strategy.micro_batch} x {one.strategy.accumulate}",
            "planned_s": mine,
            "best_cell": one.best.name,
            "best_cell_s": other,
            "regret": mine / other - 1,
            "trained_again": one.same is None,
        }
    regret = max(row["regret"] for row in rows.values())
    result = {"kind": "measured", "choices": rows, "top1_regret": regret}
    save_as("plan", result)
    return result


def _choose(
    rate: float,
    room: str,
    memory: int | None,
    seen: Mapping[Cell, Observation],
    calibration: Calibration,
) -> Choice:
    """Run `shardwise plan` and find the best cell that fits."""
    cells = [Cell(rate, name, max(BATCHES)) for name in STRATEGIES]
    cluster = seen[cells[0]].run.cluster.but(calibration=calibration)
    if memory is not None:
        cluster = cluster.but(device=cluster.device.but(memory=memory))
    fitting = [
        cell
        for cell in cells
        if estimate_run(seen[cell].run._replace(cluster=cluster)).known_memory.verdict == "fits"
    ]
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "cluster.toml").write_text(write_cluster(cluster))
        run = cells[0].case.write(folder / "run.toml")
        words = (sys.executable, "-m", "shardwise", "plan", run, "--global-batch", str(TOKENS))
        files = ("--cluster", folder / "cluster.toml", "--output", folder / "chosen.toml")
        done = subprocess.run((*words, *files), capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        strategy = read_run(folder / "chosen.toml").resolved().strategy
    same = [cell for cell in cells if seen[cell].run.strategy == strategy]
    best = min(fitting, key=lambda cell: seen[cell].step_s)
    return Choice(rate, room, strategy, best, same[0] if same else None)


def _table(strategy: Strategy) -> dict[str, Any]:
    table = strategy.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    return {"kind": strategy.kind, **table}


def show_plan(result: Mapping[str, Any]) -> None:
    for name, row in result["choices"].items():
        how = "trained in the same rounds" if row["trained_again"] else "from the sweep"
        print(f"{name:28} planned {row['planned']}: {row['planned_s'] * 1e3:.0f} ms; best cell "
              f"that fits {row['best_cell']}: {row['best_cell_s'] * 1e3:.0f} ms; regret "
              f"{row['regret']:+.1%}, {how}")  # fmt: skip
    print(f"largest regret: {result['top1_regret']:.1%}")


def tuned() -> dict[str, Any]:
    """Tune at every rate; the regret of each winner against the best cell of the sweep."""
    seen, _ = calibrate()
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as place, hosts(HOSTS, None, "tune") as made:
        folder = Path(place)
        with Session(made, RANKS_PER_HOST, folder / "session") as session:
            for rate in RATES:
                set_rate(made, rate)
                cells = {cell.name: cell for cell in seen if cell.rate == rate}

                def probe(one: Candidate) -> float | str:
                    where = folder / one.name
                    case = cells[one.name].case  # noqa: B023
                    outcome = session.run(case.write(folder / "run.toml"), where)
                    print(f"probed {one.name}", file=sys.stderr, flush=True)
                    if not outcome.ok:
                        return outcome.error
                    return statistics.median(outcome.step_s[WARM_UP:])

                candidates = [Candidate(name, seen[cell].run) for name, cell in cells.items()]
                found = tune(candidates, probe, MOST_PROBES)
                assert found.best is not None
                speeds = {c.name: c.tokens / seen[cells[c.name]].step_s for c in candidates}
                rows[f"{rate / 1e6:.0f} Mbit/s"] = {
                    "probes": [
                        {"name": p.candidate.name, "predicted_s": p.predicted_s,
                         "measured_s": p.measured_s} for p in found.probes
                    ],
                    "stopped": found.stopped,
                    "winner": found.best.candidate.name,
                    "best": max(speeds, key=lambda name: speeds[name]),
                    "regret": max(speeds.values()) / speeds[found.best.candidate.name] - 1,
                }  # fmt: skip
    result = {"kind": "measured", "rates": rows,
              "most_probes": max(len(row["probes"]) for row in rows.values()),
              "tune_regret": max(row["regret"] for row in rows.values())}  # fmt: skip
    save_as("tune", result)
    return result


def show_tuned(result: Mapping[str, Any]) -> None:
    for rate, row in result["rates"].items():
        print(f"{rate:>12}: {row['winner']} after {len(row['probes'])} probes, {row['regret']:.1%} "
              f"slower than the best cell ({row['best']})")  # fmt: skip
    print(f"at most {result['most_probes']} probes, largest regret {result['tune_regret']:.1%}")
