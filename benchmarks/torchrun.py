"""Run a benchmark script as two ranks on this machine, and return the result of rank 0."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "FOUND "


def send_result(found: Any) -> None:
    """Pass a result from rank 0 to the caller of `run_two_ranks`."""
    print(MARK + json.dumps(found), flush=True)


def run_two_ranks(script: str, *arguments: str) -> Any:
    """Run two ranks and return rank 0's result; without one, exit with the ranks' stderr."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *(script, *arguments),
    ]
    here = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": here}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if MARK in line]
    if not lines:
        sys.exit(done.stderr[-3000:])
    return json.loads(lines[0].partition(MARK)[2])
