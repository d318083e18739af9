"""Start real worker processes through torchrun and collect what rank 0 reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run_workers(
    module: str, processes: int, cases: list[dict[str, Any]], folder: Path, timeout: float = 600
) -> list[dict[str, Any]]:
    """Run `python -m module cases.json` on `processes` Gloo ranks; one result per case."""
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(processes), "--module", module, str(file)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    lines = [line.partition("RESULT ")[2] for line in done.stdout.splitlines() if "RESULT " in line]
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(lines) == len(cases)
    return [json.loads(line) for line in lines]
