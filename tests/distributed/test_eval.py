"""The held-out loss equals that of one process, and leaves no trace in the training."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.command import COMMAND, PATIENCE_S, environment
from tests.distributed.runs import RUN, lines, write
from tests.distributed.workers import Workers
from tests.gate import first_in_gate

pytest.importorskip("torch")
pytest.importorskip("transformers")
from shardwise.checkpoint.format.folder import find_folder
from shardwise.checkpoint.format.read_checkpoint import read_manifest
from tests.distributed.eval_run import held_out_loss, loss_by_hand
from tests.distributed.test_adapter_runs import assert_same_run
from tests.distributed.test_chat import write_chat
from tests.distributed.train_run import run_toml

FP64 = 'master_dtype = "fp64"\nreduce_dtype = "fp64"\n'
QUIET = 'schedule = "constant"\nmeasure = false\ntrackers = []\n'
# 1,001 bytes: 31 sequences of 32 targets and one of 8, which no number of ranks here divides.
TEXT = "The quick brown fox jumps over the lazy dog, again and again.\n"
MIXTURE = RUN.replace('family = "llama"', 'family = "mixtral"\nexperts = 4\nexperts_per_token = 2')
DATA = {
    "text": '[eval]\ndata = "held-out.txt"',
    "packed": '[eval]\ndata = "chat.jsonl"',
    "padded": '[eval.data]\npath = "chat.jsonl"\npacking = false',
    "own": '[eval.data]\nsource = "tests.distributed.eval_run:unequal_batches"',
    "synthetic": "[eval]\ntokens = 700",
}


def write_run(folder: Path, **fields: Any) -> Path:
    """A run.toml, a text of 1,001 bytes and a file of chat examples in a new folder."""
    folder.mkdir()
    (folder / "held-out.txt").write_text((TEXT * 20)[:1001])
    (folder / "text.txt").write_text("".join(random.Random(1).choices("abc ", k=9000)))
    write_chat(folder)
    return write(folder, **fields)


def loss_on(workers: Workers, folder: Path, processes: int, data: str, **fields: Any) -> Any:
    """Loss and tokens, the same on all ranks."""
    usual = {"dtype": "fp64", "train": QUIET + "checkpoint = false"}
    file = write_run(folder, **{**usual, **fields}, data=DATA[data])
    # Any number of processes, with micro-batches of the same size.
    file.write_text(file.read_text().replace("global_batch = 256", ""))
    [ranks] = workers.run(held_out_loss, processes, [{"file": str(file)}])
    assert all(rank == ranks[0] for rank in ranks)
    return ranks[0]


CASES = [
    ("zero3", 2, "text", {}),
    ("zero3", 2, "packed", {"strategy": FP64 + "context = 2"}),
    ("zero3", 4, "packed", {"strategy": FP64 + "tensor = 2"}),
    ("zero2", 2, "own", {"micro_batch": 2}),
    ("ddp", 2, "padded", {}),
    ("zero1", 2, "text", {"strategy": FP64 + 'loss = "chunked"'}),
    ("zero2", 4, "packed", {"strategy": FP64 + "replicate = 2"}),
    ("zero3", 3, "text", {"micro_batch": 1}),
    ("zero3", 4, "padded", {"strategy": FP64 + "replicate = 2"}),
    ("zero3", 4, "text", {"strategy": FP64 + "reshard_after_forward = 2"}),
    ("zero3", 4, "text", {"strategy": FP64 + "context = 2\ntensor = 2\nsequence_parallel = false"}),
    ("ddp", 2, "text", {"strategy": FP64 + "tensor = 2"}),
    ("zero3", 4, "padded", {"strategy": FP64 + 'tensor = 2\nrecompute = "full"'}),
    ("zero3", 2, "packed", {"strategy": FP64 + 'context = 2\nloss = "chunked"'}),
    ("ddp", 4, "synthetic", {}),
    ("zero3", 2, "synthetic", {"strategy": FP64 + "offload = true"}),
    ("zero3", 2, "text", {"strategy": FP64 + "split_root = true"}),
    ("ddp", 4, "own", {"micro_batch": 2}),
]


@pytest.mark.parametrize(("kind", "processes", "data", "fields"), first_in_gate(4, CASES))
def test_the_loss_is_that_of_one_process(
    tmp_path: Path, workers: Workers, kind: str, processes: int, data: str, fields: Any
) -> None:
    fields = {"strategy": FP64, **fields}
    one = {"strategy": FP64, "kind": "single"}
    if "micro_batch" in fields:
        one["micro_batch"] = fields["micro_batch"]
    expected = loss_on(workers, tmp_path / "one", 1, data, **one)
    found = loss_on(workers, tmp_path / "many", processes, data, kind=kind, **fields)
    assert found[1] == expected[1]
    assert found[0] == pytest.approx(expected[0], rel=1e-12)


# Of NF4 the parts of the matrices, and so the rounding of their sums, are those of one process.
ADAPTERS = [
    ("ddp", "fp64", "fp64", 1e-12),
    ("zero3", "fp64", "fp64", 1e-12),
    ("ddp", "nf4", "bf16", 1e-6),
]


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "base", "dtype", "within"), ADAPTERS)
def test_adapters_are_evaluated_without_dropout(
    tmp_path: Path, workers: Workers, kind: str, base: str, dtype: str, within: float
) -> None:
    """Two evaluations are equal, and equal to that of one process."""
    pytest.importorskip("peft")
    adapter = f'\n[adapter]\nrank = 4\nbase = "{base}"\ndropout = 0.3\n'
    strategy = (FP64 if dtype == "fp64" else "") + adapter
    one, many = (
        loss_on(
            workers, tmp_path / name, processes, "text", kind=of_kind, strategy=strategy,
            dtype=dtype,
        )
        for name, processes, of_kind in (("one", 1, "single"), ("many", 2, kind))
    )  # fmt: skip
    assert many == (pytest.approx(one[0], rel=within), one[1])


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "processes"), [("zero3", 2), ("zero2", 4)])
def test_divided_experts_are_evaluated(
    tmp_path: Path, workers: Workers, kind: str, processes: int
) -> None:
    """In fp32: grouped products have no fp64. The last digits differ."""
    one, many = (
        loss_on(
            workers, tmp_path / name, ranks, "text", text=MIXTURE, kind=of_kind, dtype="fp32",
            strategy=strategy,
        )
        for name, ranks, of_kind, strategy in (
            ("one", 1, "single", ""), ("many", processes, kind, "expert = 2"),
        )
    )  # fmt: skip
    assert many == (pytest.approx(one[0], rel=1e-6), one[1])


def test_the_loss_is_the_mean_over_all_targets(tmp_path: Path, workers: Workers) -> None:
    """By hand, of the bytes of the file to the last one."""
    loss, tokens = loss_on(
        workers, tmp_path / "trainer", 2, "text", kind="zero3", micro_batch=4, strategy=FP64
    )
    file = write_run(
        tmp_path / "hand", kind="single", dtype="fp64", strategy=FP64, train=QUIET,
    )  # fmt: skip
    text = str(file.parent / "held-out.txt")
    [[expected]] = workers.run(loss_by_hand, 1, [{"file": str(file), "text": text}])
    assert tokens == expected[1] == 1000
    assert loss == pytest.approx(expected[0], rel=1e-12)


RUNS = [
    ("zero3", "", False),
    ("zero3", "", True),
    ("ddp", "", True),
    ("zero2", 'grad_sync = "last"', True),
    ("zero3", 'reshard_after_backward = false\ngrad_sync = "last"', True),
    ("zero3", "tensor = 2", True),
    ("zero3", "context = 2", True),
]


@pytest.mark.parametrize(("kind", "strategy", "measured"), first_in_gate(1, RUNS))
def test_a_run_with_it_is_bit_equal_to_one_without(
    tmp_path: Path, workers: Workers, kind: str, strategy: str, measured: bool
) -> None:
    """The dropout of an adapter draws random numbers in every step, accumulated twice."""
    pytest.importorskip("peft")
    # Only at the end: a save in the background has copies in memory.
    train = f"checkpoint = {{ minutes = 0 }}\nmeasure = {str(measured).lower()}"
    adapter = '\n[adapter]\nrank = 4\nbase = "fp32"\ndropout = 0.3\n' if not strategy else ""
    for name, settings in (("without", ""), ("with", '[eval]\ndata = "held-out.txt"\nevery = 1')):
        file = write_run(
            tmp_path / name, kind=kind, steps=6, log_every=1, micro_batch=2, strategy=strategy,
            train=train, data=f'[data]\npath = "text.txt"\n{adapter}{settings}',
        )  # fmt: skip
        [ranks] = workers.run(run_toml, 2, [{"file": str(file)}])
        assert [rank.get("steps") for rank in ranks] == [6, 6], ranks
    assert_same_run(tmp_path / "without", tmp_path / "with")
    trained = [
        [(line["step"], line["loss"], line["gradient_norm"]) for line in lines(tmp_path / name)
         if "loss" in line]
        for name in ("without", "with")
    ]  # fmt: skip
    assert trained[0] == trained[1]
    evaluated = [line["step"] for line in lines(tmp_path / "with") if "eval_loss" in line]
    assert evaluated == [1, 2, 3, 4, 5, 6]
    if not measured:
        return
    found = [
        json.loads((tmp_path / name / "runs" / "it" / "measurement.json").read_text())
        for name in ("without", "with")
    ]
    assert found[0]["traffic"] == found[1]["traffic"]
    peaks = [one["memory"]["peak_allocated_bytes"] for one in found]
    assert peaks[1] == pytest.approx(peaks[0], abs=64)  # a few numbers of the trainer itself


def steps_kept(folder: Path) -> list[int]:
    return sorted(int(one.name[5:]) for one in (folder / "runs/it/checkpoints").glob("step-*"))


def test_the_best_checkpoint_is_kept(tmp_path: Path, workers: Workers) -> None:
    """A learning rate that spoils the model later; resumed in between, it remembers the best."""
    every = '[data]\npath = "text.txt"\n[eval]\ndata = "text.txt"\nevery = 2\nkeep_best = true'
    train = 'schedule = "constant"\nmeasure = false\ncheckpoint = { every = 2, keep = 1 }\n'
    folder = tmp_path / "it"
    file = write_run(folder, kind="zero3", steps=4, log_every=1, train=train, data=every)
    workers.run(run_toml, 2, [{"file": str(file)}])
    text = file.read_text().replace("steps = 4", "steps = 10")
    file.write_text(text.replace("learning_rate = 1e-2", "learning_rate = 3.0"))
    workers.run(run_toml, 2, [{"file": str(file)}])
    found = {line["step"]: line["eval_loss"] for line in lines(folder) if "eval_loss" in line}
    assert sorted(found) == [2, 4, 6, 8, 10]
    best = min(found, key=lambda step: found[step])
    assert best == 4
    assert steps_kept(folder) == [4, 10]
    manifest = read_manifest(find_folder(str(folder / "runs/it/checkpoints/step-00000004")))
    assert manifest.eval_loss == found[4]


@pytest.mark.nightly
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_an_evaluation_that_is_killed_is_repeated(tmp_path: Path, sent: signal.Signals) -> None:
    """Killed in the second evaluation, and resumed: the same lines and the same parameters."""
    train = QUIET + "checkpoint = { every = 3 }\n"
    data = '[data]\npath = "text.txt"\n[eval]\ndata = "text.txt"\nevery = 4'
    for name in ("whole", "killed"):
        write_run(tmp_path / name, kind="zero3", steps=10, log_every=1, train=train, data=data)
    command = [*COMMAND, "train", "run.toml", "--name", "it", "--resume"]
    whole = subprocess.run(
        command, cwd=tmp_path / "whole", env=environment(), capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert whole.returncode == 0, whole.stderr
    folder = tmp_path / "killed"
    # The evaluation is long: 281 sequences, in rounds of eight.
    with subprocess.Popen(
        command, cwd=folder, env=environment(), stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL, start_new_session=True,
    ) as process:  # fmt: skip
        metrics, end = folder / "runs/it/metrics.jsonl", time.monotonic() + PATIENCE_S
        while not metrics.exists() or '"step": 8' not in metrics.read_text():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.002)
        process.send_signal(sent)
        process.wait(PATIENCE_S)
    before = [line for line in lines(folder) if "eval_loss" in line]
    assert [line["step"] for line in before] == [4]
    done = subprocess.run(
        command, cwd=folder, env=environment(), capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = [
        [(line["step"], line.get("loss"), line.get("eval_loss")) for line in lines(tmp_path / name)]
        for name in ("whole", "killed")
    ]
    assert told[0] == told[1]
    assert_same_run(tmp_path / "whole", folder)
