"""Train a run.toml and return what it learned, on the ranks of `Workers`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardwise.engine.mesh import leave, world
from shardwise.spec.run import read_run
from shardwise.trainer.evaluation import Evaluated
from shardwise.trainer.loop import Logged, train
from shardwise.trainer.start import start
from shardwise.trials.accept.parity import full_tensor


class Lines:
    """Observes a run: the loss and the gradient norm of each line."""

    def __init__(self) -> None:
        self.values: list[float] = []

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        yield

    def logged(self, line: Logged) -> None:
        self.values += [line.loss, line.gradient_norm]

    def evaluated(self, found: Evaluated) -> None:
        self.values.append(found.loss)


def trained(case: dict[str, Any]) -> dict[str, list[float]]:
    """Losses and norms of `case["file"]`, the parameters at the end, and tokens by step here."""
    file, lines = Path(case["file"]), Lines()
    with contextlib.chdir(file.parent):
        run, training = start(read_run(file))
        tokens = [
            float(sum(batch.tokens for batch in training.batches.at(step)))
            for step in range(training.settings.steps)
        ]
        train(training, lines)
    parameters = [full_tensor(p.detach()).flatten() for p in training.model.parameters()]
    found = {
        "lines": lines.values,
        "parameters": [] if world()[0] else torch.cat(parameters).tolist(),
        "tokens": tokens,
    }
    del training, run
    leave()
    return found
