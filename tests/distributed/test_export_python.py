"""The script that a run becomes trains to the very losses of the trainer, bit for bit."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from tests.command import environment, shardwise
from tests.distributed.launch import launcher, output_of
from tests.distributed.runs import losses
from tests.distributed.workers import Workers

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.train_run import run_toml

LLAMA = """
[model]
name = "small"
family = "llama"
layers = 3
hidden = 64
heads = 4
kv_heads = 2
ffn = 96
vocab = 256
"""
GPT2 = """
[model]
family = "gpt2"
layers = 2
hidden = 32
heads = 4
ffn = 96
vocab = 250
dropout = 0.1
"""
MIXTRAL = """
[model]
family = "mixtral"
layers = 2
hidden = 32
heads = 4
kv_heads = 2
ffn = 48
vocab = 250
experts = 3
experts_per_token = 2
"""
OWN = """
[data]
source = "tests.distributed.sources:equal"

[model]
factory = "tests.distributed.sources:fragile"
"""
RUN = """
cluster = "1x{processes}xCPU"
{parts}

[job]
seq_len = 16

[strategy]
micro_batch = 2
{strategy}

[train]
steps = 6
learning_rate = 1e-2
log_every = 2
measure = false
{train}
"""
# Run before a script: what is hidden is as good as not installed.
HIDE = """
import sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return self._finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self._finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""
HIDDEN = ("numpy", "safetensors", "shardwise", "transformers")


class Case(NamedTuple):
    """A run, and what its script must do without."""

    processes: int
    strategy: str
    parts: str = LLAMA
    train: str = "checkpoint = false"
    hidden: tuple[str, ...] = HIDDEN


CASES = {
    "ddp": Case(2, 'kind = "ddp"\naccumulate = 2'),
    # With more than 2 ranks, sums depend on where in DDP's buckets a gradient is.
    "ddp of three": Case(3, 'kind = "ddp"\nddp_bucket_mib = 0.02\nparam_dtype = "fp32"'),
    "ddp rounded": Case(2, 'kind = "ddp"\ncompress = "fp16"'),
    "zero2": Case(
        2,
        'kind = "zero2"\naccumulate = 2\nrecompute = "full"\nparam_dtype = "fp32"',
        train="checkpoint = false\nwarmup_steps = 3\nseed = 7",
    ),
    "zero3": Case(
        2,
        'kind = "zero3"\naccumulate = 2\nrecompute = "full"\nblocks_per_unit = 2\nprefetch = 2',
        LLAMA + "tied = true",
    ),
    "hybrid": Case(4, 'kind = "zero3"\nshard = 2\naccumulate = 2\nparam_dtype = "fp32"'),
    "chunked": Case(2, 'kind = "zero3"\naccumulate = 2\nloss = "chunked"\nloss_chunks = 5'),
    "chunked ddp": Case(2, 'kind = "ddp"\nloss = "chunked"\nloss_chunks = 7'),
    "chunked gpt2": Case(
        1, 'kind = "single"\naccumulate = 2\nloss = "chunked"', GPT2, hidden=("shardwise",)
    ),
    # Built by transformers, with dropout.
    "gpt2": Case(1, 'kind = "single"\nparam_dtype = "fp32"', GPT2, hidden=("shardwise",)),
    # Two processes would pad its three experts.
    "experts": Case(2, 'kind = "zero3"\nparam_dtype = "fp32"', MIXTRAL, hidden=("shardwise",)),
    # Model and data of the user.
    "own": Case(2, 'kind = "zero3"\nparam_dtype = "fp32"', OWN),
}


def write(folder: Path, case: Case) -> Path:
    file = folder / "run.toml"
    file.write_text(RUN.format(**case._asdict()))
    return file


def trained(workers: Workers, file: Path, case: Case) -> list[float]:
    """The losses that the trainer logs, with as many threads as under a launcher."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(case.processes)):
        workers.run(run_toml, case.processes, [{"file": str(file)}])
    return losses(file.parent)


def scripted(file: Path, case: Case) -> list[float]:
    """The losses that the script of the same run logs."""
    folder = file.parent
    done = shardwise("export", str(file), "--to", "python", "-o", "train.py", folder=folder)
    assert done.returncode == 0, done.stderr
    (folder / "hide").mkdir()
    (folder / "hide" / "sitecustomize.py").write_text(f"HIDDEN = {case.hidden}\n{HIDE}")
    path = os.pathsep.join([str(folder / "hide"), environment()["PYTHONPATH"]])
    start = (sys.executable,) if case.processes == 1 else launcher(case.processes)
    settings: dict[str, Any] = {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo"}
    shown = output_of([*start, "train.py"], folder, **settings)
    text = (folder / "trained" / "metrics.jsonl").read_text()
    lines: list[dict[str, Any]] = [json.loads(line) for line in text.splitlines()]
    assert shown.count("loss") == len(lines)
    return [line["loss"] for line in lines]


# Each starts processes of its own; nightly runs them all.
GATE = ("zero3",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in GATE else [pytest.mark.nightly]) for name in CASES],
)
def test_a_script_trains_to_the_same_losses(tmp_path: Path, name: str, workers: Workers) -> None:
    case = CASES[name]
    file = write(tmp_path, case)
    expected = trained(workers, file, case)
    # After the first step, and after every second one.
    assert len(expected) == 4
    assert len(set(expected)) == 4
    assert scripted(file, case) == expected


@pytest.mark.nightly
def test_a_script_reads_the_tokens_that_training_left_and_saves(
    tmp_path: Path, workers: Workers
) -> None:
    from torch.distributed.checkpoint import FileSystemReader

    (tmp_path / "text.txt").write_text("to be or not to be, that is the question. " * 40)
    # torch itself gathers objects through NumPy when it saves.
    hidden = tuple(name for name in HIDDEN if name != "numpy")
    parts = LLAMA + '[data]\npath = "text.txt"\n'
    case = Case(2, 'kind = "zero3"', parts, "checkpoint = { every = 4 }", hidden)
    file = write(tmp_path, case)
    expected = trained(workers, file, case)
    assert scripted(file, case) == expected
    assert sorted(path.name for path in (tmp_path / "trained").glob("step-*")) == [
        "step-4",
        "step-6",
    ]
    reader = FileSystemReader(tmp_path / "trained" / "step-6")
    saved: dict[str, Any] = reader.read_metadata().state_dict_metadata
    assert saved["model.lm_head.weight"].size == (256, 64)
    assert "optimizer.state.lm_head.weight.exp_avg" in saved
