"""Kill ranks of real runs at random moments and count the recoveries.

`python benchmarks/kills.py --count 100 [--json]` starts runs of 2 and 4 processes with different
strategies and kills random ranks with SIGKILL until the runs end. Then it compares every byte of
the last checkpoint and every loss with an undisturbed run. A kill counts as recovered when the step
in which it happened is complete. The same trainer is also tested under torchrun, which keeps one
store for all attempts.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

# Make `shardwise` and `benchmarks` importable when this file is run as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from shardwise.trials.accept.victim import NAME, KillableRun, train_command

ROOT = Path(__file__).resolve().parents[1]
RUN = """
cluster = "1x{processes}xCPU"
model = "benchmarks.faults.plant:steady"
job = {{ seq_len = 16 }}
strategy = {{ {strategy}, micro_batch = 2, param_dtype = "fp32" }}

[train]
steps = 300
learning_rate = 1e-3
log_every = 1
trackers = []
measure = false
checkpoint = {{ every = 10 }}
restart = {{ attempts = 1000 }}
"""
SETUPS = (
    (2, 'kind = "zero3"'),
    (2, 'kind = "zero2"'),
    (4, 'kind = "zero3"'),
    (4, 'kind = "zero3", shard = 2, replicate = 2'),
    (4, 'kind = "zero2"'),
)
# Longest wait for a recovery.
PATIENCE_S = 180.0


class Kill(NamedTuple):
    """One kill. `recovery_s` is None if the run did not recover."""

    seed: int
    processes: int
    strategy: str
    rank: int
    step: int
    # Whether the run had recovered from the previous kill.
    settled: bool
    recovery_s: float | None


class Ended(NamedTuple):
    """A finished run and its kills."""

    kills: list[Kill]
    bit_equal: bool


def start(folder: Path, setup: tuple[int, str], torchrun: bool = False) -> KillableRun:
    """Start a run in a folder of its own."""
    processes, strategy = setup
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text(RUN.format(processes=processes, strategy=strategy))
    command = train_command(processes)
    if torchrun:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--max-restarts", "1000"),
            *("--monitor-interval", "0.1", "--nproc-per-node", str(processes)),
            *(str(Path(__file__).resolve()), "--worker", "train", "run.toml"),
            *("--name", NAME, "--resume"),
        ]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    os.environ.update(PYTHONPATH=path, OMP_NUM_THREADS="1")
    return KillableRun(folder, command, lambda: PATIENCE_S)


def reference(folder: Path, setup: tuple[int, str]) -> dict[str, Any]:
    run = start(folder, setup)
    if run.process.wait() != 0:
        sys.exit(f"the run without kills failed: {setup}")
    return run.state()


def disturbed(
    folder: Path, setup: tuple[int, str], seed: int, most: int, torchrun: bool
) -> tuple[list[Kill], KillableRun]:
    """Kill ranks of a run repeatedly, until it ends or does not recover."""
    chance = random.Random(seed)
    run = start(folder, setup, torchrun)
    kills: list[Kill] = []
    if not run.wait_for_step(1):
        return kills, run
    settled = True
    while run.running and len(kills) < most:
        time.sleep(chance.uniform(0, 3))
        rank, step = chance.randrange(setup[0]), run.step()
        begin = time.monotonic()
        if not run.running or not run.kill(rank):
            continue
        # One kill in five hits a run that is still recovering.
        if chance.random() < 0.2 and len(kills) + 1 < most and not torchrun:
            kills.append(Kill(seed, *setup, rank, step, settled, None))
            settled = False
            continue
        back = run.wait_for_step(step + 1)
        took = time.monotonic() - begin if back else None
        kills.append(Kill(seed, *setup, rank, step, settled, took))
        if back:
            kills = _all_recovered(kills)
        settled = True
        if not back:
            run.kill_all()
    run.end()
    return _all_recovered(kills) if run.process.returncode == 0 else kills, run


def _all_recovered(kills: list[Kill]) -> list[Kill]:
    """Mark kills during a recovery as recovered, without a time of their own."""
    return [kill if kill.recovery_s else kill._replace(recovery_s=-1.0) for kill in kills]


def measure(folder: Path, count: int, seed: int, torchrun: bool) -> list[Ended]:
    setups = SETUPS[:1] if torchrun else SETUPS
    undisturbed: dict[tuple[int, str], dict[str, Any]] = {}
    found: list[Ended] = []
    number = 0
    while (left := count - sum(len(run.kills) for run in found)) > 0:
        setup = setups[number % len(setups)]
        if setup not in undisturbed:
            undisturbed[setup] = reference(folder / f"reference-{number}", setup)
        kills, run = disturbed(folder / f"run-{number}", setup, seed + number, left, torchrun)
        try:
            equal = run.state() == undisturbed[setup]
        except OSError:
            equal = False
        found.append(Ended(kills, equal))
        back = sum(kill.recovery_s is not None for kill in kills)
        print(
            f"{'torchrun' if torchrun else 'shardwise'} seed {seed + number}: {setup[0]} x "
            f"{setup[1]}: {back} of {len(kills)} kills recovered, "
            f"{'same result' if equal else 'DIFFERENT RESULT'}",
            file=sys.stderr,
            flush=True,
        )
        number += 1
    return found


def summary(runs: list[Ended]) -> dict[str, Any]:
    kills = [kill for run in runs for kill in run.kills]
    timed = [kill for kill in kills if kill.settled and (kill.recovery_s or 0) > 0]
    two, four = (
        [k.recovery_s for k in timed if k.processes == n and k.recovery_s is not None]
        for n in (2, 4)
    )
    return {
        "kills": len(kills),
        "recovered": sum(kill.recovery_s is not None for kill in kills),
        "bit_equal": sum(len(run.kills) for run in runs if run.bit_equal),
        "runs": len(runs),
        "median_recovery_s": median(two) if two else None,
        "recovery_s_range": [min(two), max(two)] if two else None,
        "median_recovery_s_of_4": median(four) if four else None,
        "seeds": [kill.seed for kill in kills],
    }


def main() -> None:
    if "--worker" in sys.argv:
        # Like any script under torchrun: one store for all attempts.
        os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
        sys.argv = ["shardwise", *sys.argv[2:]]
        from shardwise.cli.start import main as command

        command()
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--torchrun", type=int, help="kills under torchrun (default: a seventh of --count)"
    )
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    under = asked.count // 7 if asked.torchrun is None else asked.torchrun
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        ours = measure(Path(folder, "ours"), asked.count, asked.seed, torchrun=False)
        theirs = measure(Path(folder, "torchrun"), under, asked.seed, torchrun=True)
    found = {**summary(ours), "torchrun": summary(theirs)}
    if asked.json:
        print(json.dumps(found, indent=1))
        return
    for name, one in (("shardwise", found), ("torchrun", found["torchrun"])):
        took = one["median_recovery_s"]
        print(
            f"{name}: {one['kills']} kills in {one['runs']} runs, {one['recovered']} recovered, "
            f"{one['bit_equal']} of them in runs with the same result; median recovery on 2 "
            f"processes: {f'{took:.1f} s' if took else 'none'}"
        )


if __name__ == "__main__":
    main()
