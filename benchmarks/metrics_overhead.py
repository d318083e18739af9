"""Overhead of `[train.metrics]`, in instructions: of a log line, of a scrape and of a step.

    python benchmarks/metrics_overhead.py [--json]

Counted under callgrind (`apt-get install valgrind`), so without noise, even on a busy machine. A
scrape is counted with the client that asks for it, in the same process: an upper bound. The step is
that of the small model of `benchmarks/overhead.py --instructions`, a fraction of any real one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

# Make `benchmarks` importable when this file is run as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.overhead import instructions
from benchmarks.torchrun import ROOT

# Prometheus' own default is a minute; many use 15 seconds.
SCRAPE_EVERY_S = 15.0
VALUES = {
    "loss": 3.25, "gradient_norm": 1.5, "learning_rate": 3e-4, "skipped": 0.0, "step_s": 0.5,
    "step_s_p10": 0.4, "step_s_p90": 0.6, "tokens_per_s": 4096.0, "tokens_per_s_per_device": 512.0,
    "mfu": 0.4, "memory_current_bytes": 1e9, "memory_peak_bytes": 2e9, "memory_reserved_bytes": 3e9,
}  # fmt: skip
# How often each action is done in the short and in the long run, whose difference counts.
COUNTS = {"log": (100, 1100), "scrape": (5, 25), "textfile": (5, 25)}


def act(action: str, count: int) -> None:
    """Do one of the three actions `count` times."""
    from prometheus_client import CollectorRegistry, start_http_server, write_to_textfile

    from shardwise.trainer.prometheus import LiveRun, RunCollector
    from shardwise.trainer.run_record import Progress

    labels = {"model": "m", "strategy": "zero3", "cluster": "8xH100-SXM", "version": "1"}
    with tempfile.TemporaryDirectory() as folder:
        progress = Progress(lambda: 7, lambda: 5, lambda: None, dict)
        run = LiveRun(Path(folder), labels, 1000, progress, 0.5, 10**9)
        collector, registry = RunCollector(run), CollectorRegistry()
        collector.log(1, VALUES)
        registry.register(collector)
        server, _ = start_http_server(0, "127.0.0.1", registry)
        for number in range(count):
            if action == "log":
                collector.log(number, VALUES)
            elif action == "scrape":
                address = f"http://127.0.0.1:{server.server_port}/metrics"
                urllib.request.urlopen(address).read()
            else:
                write_to_textfile(f"{folder}/it.prom", registry)
        server.shutdown()


def counted(action: str) -> float:
    """Instructions of one action, from the difference of two runs under callgrind."""
    found = []
    for count in COUNTS[action]:
        command = [
            *("valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null", sys.executable),
            *(__file__, "--act", action, "--count", str(count)),
        ]
        here = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        environment = {**os.environ, "PYTHONHASHSEED": "0", "PYTHONPATH": here}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        lines = [line for line in done.stderr.splitlines() if "Collected :" in line]
        if not lines:
            sys.exit(done.stderr[-3000:])
        found.append(int(lines[-1].split()[-1]))
    few, many = COUNTS[action]
    return (found[1] - found[0]) / (many - few)


def instructions_per_s(of_log: float) -> float:
    """Instructions of Python code that a core of this machine executes in a second of its time."""
    begin = time.process_time()
    act("log", 200_000)
    return 200_000 * of_log / (time.process_time() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--act", choices=COUNTS, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.act:
        act(options.act, options.count)
        return
    found = {action: counted(action) for action in COUNTS}
    per_second = instructions_per_s(found["log"])
    step = instructions("shardwise")
    scrapes = max(found["scrape"], found["textfile"]) / (SCRAPE_EVERY_S * per_second)
    result = {
        "instructions": {**found, "step": step},
        "instructions_per_s": per_second,
        "log_share": found["log"] / step,
        "scrape_share": scrapes,
        "share": found["log"] / step + scrapes,
    }
    if options.json:
        print(json.dumps(result, indent=2))
        return
    for action, count in {**found, "step": step}.items():
        print(f"{action:10} {count:14,.0f} instructions")
    print(f"a log line every step: {result['log_share']:.4%} of a step")
    print(f"a scrape every {SCRAPE_EVERY_S:.0f} s:   {scrapes:.4%} of a core")
    print(f"both:                  {result['share']:.4%}")


if __name__ == "__main__":
    main()
