"""Train GPT-2 Large (774 M parameters, fp32) with zero3 on two processes for a few steps.

    python benchmarks/large.py [--json]

Prints the predicted peak of tensors, the peak measured in a real step, and the peak resident memory
reported by the operating system.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

RUN = """
model = "gpt2-large"
cluster = "1x2xCPU"
job = { seq_len = 64 }
strategy = { kind = "zero3", param_dtype = "fp32" }

[train]
steps = 3
log_every = 1
trackers = []
checkpoint = false
"""


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "large.toml").write_text(RUN)
        command = [sys.executable, "-m", "shardwise", "train", "large.toml", "--json"]
        done = subprocess.run(
            [*command, "--nproc", "2"], cwd=folder, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(done.stdout + done.stderr)
        result: dict[str, Any] = json.loads(done.stdout)
        lines = next(Path(folder).rglob("metrics.jsonl")).read_text().splitlines()
    return {
        "losses": [json.loads(line)["loss"] for line in lines],
        "parameters": result["predicted"]["model"]["parameters"],
        "predicted_peak_bytes": result["predicted"]["memory"]["peak_allocated_bytes"],
        "measured_peak_bytes": result["measured"]["memory"]["peak_allocated_bytes"],
        "resident_before_bytes": json.loads(lines[0])["resident_bytes"],
        "resident_peak_bytes": result["last"]["resident_peak_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    found = run()
    if as_json:
        print(json.dumps(found, indent=2))
        return
    print(f"{found['parameters']:,} parameters, loss {found['losses']}")
    print("per process:")
    for name in ("predicted_peak_bytes", "measured_peak_bytes", "resident_peak_bytes"):
        print(
            f"  {name.removesuffix('_bytes').replace('_', ' '):16} {found[name] / 2**30:6.2f} GiB"
        )


if __name__ == "__main__":
    main()
