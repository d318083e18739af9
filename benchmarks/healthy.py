"""Train healthy runs under unfavourable conditions; none may be killed or restarted.

`python -m benchmarks.healthy [--count 200] [--lanes 4] [--json]` trains real runs of 2, 3 and 4
processes with steps of 10 ms to 120 s, slow first steps, slow saves and launchers that are stopped
for a while. To save time, every duration and every limit of [train.restart] is a tenth of what it
stands for: a step of 12 s stands for one of two minutes. Delays by other work on this machine are
not shortened, so the limits are stricter than in a real run. `benchmarks.hosts` has slow links.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.faults import plant

FASTER = 10
# Limits of 10, 30 and 1,800 seconds by default.
RESTART = "restart = { named_after_s = 1.0, killed_after_s = 3.0, slow_after_s = 180.0 }"
STOPPED_S = 5.0
ROOT = Path(__file__).resolve().parents[1]
METRICS = Path("runs", "it", "metrics.jsonl")


class Condition(NamedTuple):
    """What a run has to bear, in seconds of a real run."""

    name: str
    step_s: float = 0.1
    first_step_s: float = 0.0
    fault: str = ""
    stops_launcher: bool = False


CONDITIONS = (
    *(Condition(f"steps of {s:g} s", step_s=s) for s in (0.01, 0.1, 1, 5, 20, 60, 120)),
    Condition("first step of 200 s", first_step_s=200),
    Condition("first step of 60 s, steps of 10 s", step_s=10, first_step_s=60),
    # A pause of 3 s in the second save.
    Condition("save of 30 s", fault="pause@before commit:0"),
    Condition("shard of 30 s", fault="pause@during shard write:0"),
    Condition("launcher stopped for 50 s", step_s=2, stops_launcher=True),
)


class Outcome(NamedTuple):
    condition: str
    processes: int
    ended: bool
    killed: bool
    # Whether a rank was reported, though not killed.
    named: bool
    took_s: float


def train(folder: Path, condition: Condition, processes: int) -> Outcome:
    """Train one run."""
    steps = 12 if condition.step_s >= 2 else 30
    text = plant.RUN.format(train=f"checkpoint = {{ every = 5 }}\n{RESTART}")
    text = text.replace("steps = 30", f"steps = {steps}").replace("1x2x", f"1x{processes}x")
    folder.mkdir()
    (folder / "run.toml").write_text(text)
    variables = {
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "OMP_NUM_THREADS": "1",
        plant.STEP_S: str(condition.step_s / FASTER),
        plant.FIRST_STEP_S: str(condition.first_step_s / FASTER),
        plant.FAULT: condition.fault,
        plant.MARK: str(folder / "mark"),
    }
    words = ("train", "run.toml", "--nproc", str(processes), "--name", "it")
    begin = time.monotonic()
    with (folder / "output.txt").open("w") as output:
        running = subprocess.Popen(
            [sys.executable, "-m", "shardwise", *words],
            cwd=folder,
            env={**os.environ, **variables},
            stdout=output,
            stderr=output,
        )
        if condition.stops_launcher:
            _stop_for_a_while(running, folder / METRICS)
        code = running.wait()
    lines = (folder / METRICS).read_text().splitlines()
    return Outcome(
        condition.name,
        processes,
        ended=code == 0 and [json.loads(line)["step"] for line in lines] == [*range(1, steps + 1)],
        killed=(folder / METRICS).with_name("recoveries.jsonl").exists(),
        named=(folder / METRICS).with_name("hangs").exists(),
        took_s=time.monotonic() - begin,
    )


def _stop_for_a_while(launcher: subprocess.Popen[bytes], metrics: Path) -> None:
    """Stop a launcher after the first step of its run."""
    while not metrics.exists() and launcher.poll() is None:
        time.sleep(0.1)
    launcher.send_signal(signal.SIGSTOP)
    time.sleep(STOPPED_S)
    launcher.send_signal(signal.SIGCONT)


def summary(outcomes: list[Outcome]) -> dict[str, Any]:
    return {
        "runs": len(outcomes),
        "ended": sum(one.ended for one in outcomes),
        "killed": sum(one.killed for one in outcomes),
        "named": sum(one.named for one in outcomes),
        "conditions": {
            condition.name: sum(one.condition == condition.name for one in outcomes)
            for condition in CONDITIONS
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--lanes", type=int, default=4, help="runs at a time")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    kinds = itertools.cycle(itertools.product(CONDITIONS, (2, 3, 4)))
    chosen = list(itertools.islice(kinds, asked.count))
    random.Random(0).shuffle(chosen)  # so that long runs do not end together
    outcomes = []
    with (
        tempfile.TemporaryDirectory(prefix="healthy-") as parent,
        ThreadPoolExecutor(asked.lanes) as lanes,
    ):
        folders = (Path(parent, str(number)) for number in range(len(chosen)))
        for one in lanes.map(train, folders, *zip(*chosen, strict=True)):
            outcomes.append(one)
            print(one, file=sys.stderr, flush=True)
    found = summary(outcomes)
    print(json.dumps(found, indent=1) if asked.json else found)


if __name__ == "__main__":
    main()
