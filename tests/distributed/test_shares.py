"""Ranks that compute different numbers of micro-batches train what one process trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.runs import lines, write
from tests.distributed.workers import Workers
from tests.gate import first_in_gate

pytest.importorskip("torch")
pytest.importorskip("transformers")
from tests.distributed.shares_run import trained
from tests.distributed.test_adapter_runs import assert_same_run
from tests.distributed.test_chat import write_chat
from tests.distributed.train_run import run_toml

FP64 = 'master_dtype = "fp64"\nreduce_dtype = "fp64"\n'
TRAIN = 'schedule = "constant"\nclip_norm = 0.5\n'
# Answers of unequal length, one in each sequence: every sequence has another weight.
PADDED = '[data]\npath = "chat.jsonl"\npacking = false\n'
DATA = {
    "padded": PADDED,
    "packed": '[data]\npath = "chat.jsonl"\n',
    "synthetic": "",
    "evaluated": PADDED + '[eval]\ndata = "chat.jsonl"\nevery = 2\n',
}


def shares(*parts: tuple[int, int]) -> str:
    """A line of `[strategy]`: by part, the devices and the micro-batches of each."""
    told = ", ".join(f"{{ devices = {d}, accumulate = {a} }}" for d, a in parts)
    return f"shares = [{told}]\n"


def write_shares(folder: Path, data: str = "padded", family: str = "llama", **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    write_chat(folder)
    usual = {"dtype": "fp64", "steps": 6, "log_every": 1, "micro_batch": 1}
    train = TRAIN + fields.pop("train", "checkpoint = false\nmeasure = false\n")
    file = write(folder, **{**usual, **fields}, train=train, data=DATA[data])
    text = file.read_text().replace("global_batch = 256", "")
    # Llama's norms compute in fp32. That rounds gradients of a mean over three ranks, which is no
    # power of two, differently from those of one process.
    file.write_text(text.replace('family = "llama"', f'family = "{family}"'))
    return file


CASES: list[tuple[str, tuple[tuple[int, int], ...], str, str]] = [
    ("ddp", ((1, 2), (1, 5)), "padded", ""),
    ("zero1", ((1, 4), (2, 1)), "evaluated", ""),
    ("zero3", ((2, 1), (2, 3)), "packed", "shard = 2\n"),
    ("ddp", ((1, 3), (3, 1)), "padded", ""),
    ("zero2", ((2, 2), (2, 1)), "synthetic", "shard = 2\ngrad_sync = 'local'\n"),
    ("zero1", ((2, 3), (2, 1)), "padded", "context = 2\n"),
    ("zero1", ((2, 2), (2, 1)), "synthetic", "tensor = 2\n"),
    ("ddp", ((1, 3), (2, 1)), "packed", ""),
]


@pytest.mark.parametrize(("kind", "parts", "data", "strategy"), first_in_gate(3, CASES))
def test_unequal_ranks_train_what_one_process_does(
    tmp_path: Path,
    workers: Workers,
    kind: str,
    parts: tuple[tuple[int, int], ...],
    data: str,
    strategy: str,
) -> None:
    processes = sum(devices for devices, _ in parts)
    inner = 2 if "context" in strategy or "tensor" in strategy else 1
    total = sum(devices * count for devices, count in parts) // inner
    family = "gpt2" if processes == 3 else "llama"
    one, many = (
        write_shares(tmp_path / name, data, family, kind=of_kind, strategy=FP64 + settings)
        for name, of_kind, settings in (
            ("one", "single", f"accumulate = {total}"),
            ("many", kind, strategy + shares(*parts)),
        )
    )
    [[expected]] = workers.run(trained, 1, [{"file": str(one)}])
    [found] = workers.run(trained, processes, [{"file": str(many)}])
    for key in ("lines", "parameters"):
        assert len(found[0][key]) == len(expected[key]) > 0
        worst = max(abs(a - b) for a, b in zip(found[0][key], expected[key], strict=True))
        assert worst <= 1e-12, f"{key}: {worst}"
    # Of each step the same tokens, and more of them where there are more micro-batches.
    by_step = [sum(rank) for rank in zip(*(one["tokens"] for one in found[::inner]), strict=True)]
    assert by_step == expected["tokens"]


def test_a_resumed_run_of_unequal_shares_is_equal_to_the_bit(
    tmp_path: Path, workers: Workers
) -> None:
    for name, ends in (("whole", (6,)), ("resumed", (2, 6))):
        for end in ends:
            file = write_shares(
                tmp_path / name, kind="ddp", steps=end, train="checkpoint = { every = 2 }\n",
                strategy=shares((1, 3), (1, 1)), dtype="fp32",
            )  # fmt: skip
            [ranks] = workers.run(run_toml, 2, [{"file": str(file)}])
            assert [rank.get("steps") for rank in ranks] == [end, end], ranks
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    trained = [
        [(line["step"], line["loss"], line["gradient_norm"]) for line in lines(tmp_path / name)]
        for name in ("whole", "resumed")
    ]
    assert trained[0] == trained[1]


REFUSED = [
    ("zero3", ((1, 2), (1, 1)), "", "zero3 gathers parameters"),
    ("zero2", ((1, 2), (1, 1)), "", "zero2 reduces gradients"),
    ("ddp", ((1, 2), (1, 1)), 'grad_sync = "every"\n', "strategy.grad_sync"),
    ("ddp", ((1, 2), (2, 1)), "", "are of 3 devices"),
]


@pytest.mark.parametrize(("kind", "parts", "strategy", "why"), REFUSED)
def test_what_would_wait_forever_is_refused(
    tmp_path: Path,
    workers: Workers,
    kind: str,
    parts: tuple[tuple[int, int], ...],
    strategy: str,
    why: str,
) -> None:
    file = write_shares(tmp_path, kind=kind, dtype="fp32", strategy=strategy + shares(*parts))
    [ranks] = workers.run(run_toml, 2, [{"file": str(file)}])
    assert all(why in rank["refused"] for rank in ranks)
