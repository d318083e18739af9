"""Training on packed chat examples: resumed to the bit, and one mean over all ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.runs import lines, losses, train, write
from tests.distributed.workers import Workers
from tests.gate import first_in_gate

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.train_run import run_toml

DATA = '[data]\npath = "chat.jsonl"\npacking = {packing}\nformat = "chat"'
FP64 = 'master_dtype = "fp64"\nreduce_dtype = "fp64"'
QUIET = 'schedule = "constant"\nmeasure = false\ntrackers = []\n'


def write_chat(folder: Path, examples: int = 90) -> None:
    """Answers of very unequal length, so that ranks count unequal numbers of tokens."""
    draw = random.Random(0)
    records = [
        {"prompt": "q" * draw.randint(0, 8), "completion": "yes " * draw.choice([0, 1, 1, 5])}
        for _ in range(examples)
    ]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "chat.jsonl").write_text(text)


def run(workers: Workers, folder: Path, processes: int, **fields: Any) -> None:
    file = write(folder, **fields)
    text = file.read_text().replace("seq_len = 32", "seq_len = 64")
    file.write_text(text.replace("global_batch = 256", "global_batch = 512"))
    [ranks] = workers.run(run_toml, processes, [{"file": str(file)}])
    assert [rank.get("steps") for rank in ranks] == [fields["steps"]] * processes, ranks


@pytest.mark.parametrize("loss", first_in_gate(1, ["chunked", "plain"]))
def test_resume_in_the_middle_of_a_packed_epoch(
    tmp_path: Path, workers: Workers, loss: str
) -> None:
    """Eight sequences per step; an epoch has more than the four steps before the stop."""
    settings = {
        "data": DATA.format(packing="true"),
        "strategy": f'loss = "{loss}"',
        "micro_batch": 2,
        "log_every": 1,
        "train": QUIET + "checkpoint = { every = 3 }",
    }
    for name, ends in (("whole", (8,)), ("resumed", (3, 8))):
        folder = tmp_path / name
        folder.mkdir()
        write_chat(folder, 200)
        for steps in ends:
            run(workers, folder, 2, steps=steps, **settings)
    [index] = (tmp_path / "whole").glob(".shardwise-cache/*-packed-64/ends/index.json")
    assert json.loads(index.read_text())["statistics"]["sequences"] > 3 * 8
    assert len(losses(tmp_path / "whole")) == 8
    assert losses(tmp_path / "resumed") == losses(tmp_path / "whole")


@pytest.mark.parametrize("packing", first_in_gate(1, ["true", "false"]))
def test_the_mean_is_over_all_tokens_that_count(
    tmp_path: Path, workers: Workers, packing: str
) -> None:
    """Two processes, accumulated or not, are one process: losses and gradient norms."""
    found = {}
    for name, processes, kind, micro_batch in (
        ("one", 1, "single", 8),
        ("accumulated", 1, "single", 2),
        ("ddp", 2, "ddp", 1),
        ("zero3", 2, "zero3", 2),
    ):
        folder = tmp_path / name
        folder.mkdir()
        write_chat(folder)
        run(
            workers, folder, processes, kind=kind, micro_batch=micro_batch, dtype="fp64",
            steps=3, log_every=1, strategy=FP64, data=DATA.format(packing=packing),
            train=QUIET + "checkpoint = false",
        )  # fmt: skip
        found[name] = [(line["loss"], line["gradient_norm"]) for line in lines(folder)]
    for name, values in found.items():
        for (loss, norm), (expected, expected_norm) in zip(values, found["one"], strict=True):
            assert loss == pytest.approx(expected, rel=1e-12), name
            assert norm == pytest.approx(expected_norm, rel=1e-11), name


@pytest.mark.parametrize("kind", first_in_gate(1, ["ddp", "zero3"]))
def test_bf16(tmp_path: Path, workers: Workers, kind: str) -> None:
    """DDP by autocast, which keeps fp32 weights; zero3 with weights in bf16."""
    write_chat(tmp_path)
    data = DATA.format(packing="true")
    run(workers, tmp_path, 2, kind=kind, dtype="bf16", steps=3, data=data, train=QUIET)
    assert losses(tmp_path)[-1] < losses(tmp_path)[0]


@pytest.mark.nightly
def test_the_example_is_learned(tmp_path: Path) -> None:
    from tests.command import ROOT

    for name in ("chat.jsonl", "chat.toml"):
        (tmp_path / name).write_text((ROOT / "examples" / name).read_text())
    shown = train(tmp_path / "chat.toml", "--nproc", "2").stdout
    assert "40 examples" in shown
    assert "loss tokens/s" in shown
    assert losses(tmp_path)[-1] < 0.1
