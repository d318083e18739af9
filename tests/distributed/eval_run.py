"""Compute the held-out loss of a run that has not trained yet, on the ranks of `Workers`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from shardwise.engine.mesh import leave
from shardwise.spec.run import read_run
from shardwise.trainer.start import start


def held_out_loss(case: dict[str, Any]) -> tuple[float, int]:
    """Loss and tokens of two evaluations of `case["file"]`, which must be equal."""
    file = Path(case["file"])
    with contextlib.chdir(file.parent):
        _, training = start(read_run(file))
        assert training.evaluation is not None
        first, again = (training.evaluation.run(0, lambda: False) for _ in range(2))
    assert first is not None
    assert again is not None
    assert all(module.training for module in training.model.modules())
    assert (first.loss, first.tokens) == (again.loss, again.tokens)
    del training
    leave()
    return first.loss, first.tokens


def loss_by_hand(case: dict[str, Any]) -> tuple[float, int]:
    """The same for a file of text, one sequence after the other, from bytes and logits alone."""
    file = Path(case["file"])
    with contextlib.chdir(file.parent):
        run, training = start(read_run(file))
        text = torch.tensor(list(Path(case["text"]).read_bytes()))
    training.model.eval()
    total, count, seq_len = 0.0, 0, run.job.seq_len
    with torch.no_grad():
        for begin in range(0, len(text) - 1, seq_len):
            ids = text[begin : begin + seq_len + 1]
            logits = training.model(input_ids=ids[None, :-1]).logits[0]
            total += float(cross_entropy(logits, ids[1:], reduction="sum"))
            count += len(ids) - 1
    return total / count, count


def unequal_batches(rank: int, world: int) -> list[torch.Tensor]:
    """Seven micro-batches of two sequences, of which a rank has each `world`-th."""
    draw = torch.Generator().manual_seed(3)
    batches = torch.randint(256, (7, 2, 33), generator=draw)
    return list(batches[rank::world])
