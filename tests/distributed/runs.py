"""Runs to train in tests: their files, and what they leave."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

from tests.command import shardwise

RUN = """
cluster = "1x2xCPU"

[model]
name = "small"
family = "llama"
layers = 3
hidden = 64
heads = 4
ffn = 96
vocab = 256
max_positions = 64

[job]
seq_len = 32
global_batch = 256
{job}

[strategy]
kind = "{kind}"
micro_batch = {micro_batch}
param_dtype = "{dtype}"
{strategy}

[train]
steps = {steps}
learning_rate = 1e-2
log_every = {log_every}
{train}

{data}
"""
FOREIGN = """
cluster = "1x2xCPU"
model = "tests.distributed.sources:fragile"
job = {{ seq_len = 16 }}
strategy = {{ kind = "zero3", micro_batch = 2, param_dtype = "fp32", accumulate = {accumulate} }}
data = {{ source = "tests.distributed.sources:{source}" }}

[train]
steps = 10
log_every = 2
{train}
"""


def write(folder: Path, text: str = RUN, **fields: Any) -> Path:
    usual = {"kind": "zero3", "micro_batch": 4, "dtype": "fp32", "steps": 8, "log_every": 2}
    blank = dict.fromkeys(("job", "strategy", "train", "data"), "")
    file = folder / "run.toml"
    file.write_text(text.format(**{**blank, **usual, **fields}))
    return file


# Of libraries that a run imports: torchao's kernels, torch's trees, bars of progress.
NOT_OURS = re.compile(r"torchao|pytree|\d+%\|", re.IGNORECASE)


def train(file: Path, *options: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """Train in processes of its own, whose libraries must say nothing."""
    done = shardwise("train", str(file), "--name", "it", *options, folder=file.parent)
    assert done.returncode == code, done.stdout + done.stderr
    assert not NOT_OURS.search(done.stderr), done.stderr
    return done


def lines(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "runs" / "it" / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder)]
