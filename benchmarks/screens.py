"""Forty screens at 80 columns as text files, to look at and to compare with another version.

    python -m benchmarks.screens build/screens --traces ../shared/traces
    python -m benchmarks.screens build/before --python other/bin/python

Each file holds the command, what it printed and its exit code. The table says how long a screen is,
and names what is wrong with one: lines over 80 columns, a plan over 30 lines, a traceback.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

COLUMNS, PLAN_LINES = 80, 30
PLANS = {
    "8b-node": "--model llama-3-8b --cluster 8xH100-SXM",
    "8b-two-nodes": "--model llama-3-8b --cluster 2x8xH100-SXM@400Gbps",
    "8b-slow-network": "--model llama-3-8b --cluster 8x8xH100-SXM@100Gbps --global-batch 4Mi",
    "8b-explain": "--model llama-3-8b --cluster 8xH100-SXM --explain",
    "8b-one-gpu": "--model llama-3-8b --cluster 1xH100-SXM",
    "8b-consumer": "--model llama-3-8b --cluster 8xRTX-4090",
    "8b-memory": "--model llama-3-8b --cluster 8xH100-SXM --objective memory",
    "8b-sequence": "--model llama-3.1-8b --cluster 8xH100-SXM --objective sequence",
    "8b-long": "--model llama-3.1-8b --cluster 8xH100-SXM --seq-len 131072",
    "8b-lora-trl": "--model llama-3-8b --cluster 8xH100-SXM --adapter lora:16 --for trl",
    "8b-qlora-one": "--model llama-3-8b --cluster 1xRTX-4090 --adapter qlora:16",
    "8b-deepspeed": "--model llama-3-8b --cluster 8xA100-80GB --for deepspeed",
    "8b-deepspeed-muon": "--model llama-3-8b --cluster 8xA100-80GB --for deepspeed "
    "--optimizer muon",
    "8b-slurm": "--model llama-3-8b --cluster 4x8xH100-SXM@400Gbps --for slurm",
    "8b-low-bit": "--model llama-3-8b --cluster 8xA100-40GB --optimizer adamw-8bit",
    "8b-odd-batch": "--model gpt2 --cluster 2x8xH100-SXM@400Gbps --seq-len 1024 "
    "--global-batch 512K",
    "8b-budget": "--model llama-3-8b --cluster 8x8xH100-SXM@400Gbps --tokens 1T --price 2.5 "
    "--deadline 30",
    "70b-node": "--model llama-3-70b --cluster 8xH100-SXM",
    "70b-qlora": "--model llama-3-70b --cluster 8xH100-SXM --adapter qlora:16",
    "70b-512": "--model llama-3-70b --cluster 64x8xH100-SXM@400Gbps --global-batch 4Mi",
    "70b-4096": "--model llama-3-70b --cluster 512x8xH100-SXM@400Gbps",
    "405b-bridge": "--model llama-3.1-405b --cluster 2048x8xH100-SXM@400Gbps --seq-len 8192 "
    "--global-batch 16Mi --for megatron-bridge",
    "moe": "--model mixtral-8x7b --cluster 8xA100-40GB",
    "money": "--model llama-3-8b --cluster 8x8xH100-SXM@100Gbps --objective money --tokens 1T "
    "--price 2.5",
    "v100": "--model llama-3.2-1b --cluster 8xV100-SXM2-32GB --precision fp16",
    "wrong": "--model llama-3-9b --cluster 8xH100-SXM",
}
OTHERS = {
    "estimate-fits": "estimate --model llama-3-8b --cluster 8xH100-SXM --strategy zero3 "
    "--recompute full",
    "estimate-at-risk": "estimate --model llama-3-8b --cluster 8xH100-SXM --seq-len 8192 "
    "--strategy zero3",
    "estimate-does-not-fit": "estimate --model llama-3-8b --cluster 1xH100-SXM",
    "estimate-slow-network": "estimate --model llama-3-8b --cluster 8x8xH100-SXM@50Gbps "
    "--strategy zero3",
    "estimate-cpu": "estimate --model gpt2 --cluster 1x2xCPU --seq-len 128",
    "whatif-network": "whatif --model llama-3-8b --cluster 8x8xH100-SXM@400Gbps "
    "--vary network=50,100,400",
    "whatif-devices": "whatif --model llama-3-8b --cluster 4x8xH100-SXM@400Gbps "
    "--vary devices=8,16,32",
    "catalog-devices": "catalog devices",
    "catalog-accuracy": "catalog accuracy",
    "catalog-kernels": "catalog kernels --device H100-SXM",
    "help": "--help",
}
TRACES = {
    "trace-two-stragglers": "trace megatron_tp8_8rank",
    "trace-one-step": "trace param_dlrm_8rank",
    "trace-data": "trace kineto_tb/resnet50_num_workers_0.json.gz",
    "diff-data": "diff kineto_tb/resnet50_num_workers_4.json.gz "
    "kineto_tb/resnet50_num_workers_0.json.gz",
}


def render(python: str, command: str, folder: Path | None) -> tuple[str, int]:
    """What a command prints at 80 columns on a pipe, and its exit code."""
    done = subprocess.run(
        [python, "-m", "shardwise", *shlex.split(command)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "COLUMNS": str(COLUMNS), "NO_COLOR": "1"},
        cwd=folder,
        check=False,
    )
    return done.stdout, done.returncode


def faults(command: str, printed: str) -> list[str]:
    """What is wrong with a screen, whatever it says."""
    # An error is one line, however long, so that a search finds it.
    lines = [line for line in printed.splitlines() if not line.startswith("error: ")]
    found = ["over 80 columns"] if any(len(line) > COLUMNS for line in lines) else []
    short = command.startswith("plan ") and "--explain" not in command
    if short and len(lines) > PLAN_LINES:
        found.append(f"over {PLAN_LINES} lines")
    if "Traceback" in printed:
        found.append("a traceback")
    return found


def main() -> None:
    """Write the screens and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--traces", type=Path, help="folder of traces; without it none are read")
    parser.add_argument("--python", default=sys.executable, help="that of another version")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    screens = {f"plan-{name}": f"plan {words}" for name, words in PLANS.items()} | OTHERS
    if options.traces is not None:
        screens |= TRACES
    for name, command in screens.items():
        folder = options.traces if name in TRACES else None
        printed, code = render(options.python, command, folder)
        text = f"$ shardwise {command}\n{printed}exit {code}\n"
        (options.folder / f"{name}.txt").write_text(text, encoding="utf-8")
        wrong = "; ".join(faults(command, printed))
        sys.stdout.write(f"{name:24} {len(printed.splitlines()):3} lines  exit {code}  {wrong}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
