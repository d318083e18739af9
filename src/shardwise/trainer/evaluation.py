"""The held-out loss of a run: the mean over all tokens that count, on all ranks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from shardwise.engine.evaluation import evaluating
from shardwise.engine.loss import loss_of
from shardwise.engine.rank_tree import shared_tree
from shardwise.engine.sync import micro_batch, strategy_of
from shardwise.launch.heartbeat import section
from shardwise.trainer.data.batches import MicroBatch
from shardwise.trainer.data.held_out import HeldOut


class Evaluated(NamedTuple):
    """The held-out loss after `step` steps: the mean over `tokens` targets, and its seconds."""

    step: int
    loss: float
    tokens: int = 0
    seconds: float = 0.0

    @property
    def perplexity(self) -> float:
        """e to the loss; infinite for a loss beyond floating point."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def values(self) -> dict[str, float]:
        """The values by the names that metrics have."""
        return {
            "eval_loss": self.loss,
            "eval_perplexity": self.perplexity,
            "eval_tokens": float(self.tokens),
            "eval_s": self.seconds,
        }


class _Rounds:
    """The rounds of one evaluation: iterates over this rank's micro-batches, as long as all do.

    A rank whose data ended gets empty ones. All rounds end early if `stops` is true on any rank.
    """

    def __init__(self, held_out: HeldOut, stops: Callable[[], bool]) -> None:
        self._own, self._empty, self._stops = held_out.micro_batches(), held_out.empty, stops
        self.is_stopped = False

    def __iter__(self) -> Iterator[MicroBatch]:
        while True:
            batch = next(self._own, None)
            found = torch.tensor([batch is not None, self._stops()], dtype=torch.int64)
            shared_tree().all_reduce(found)
            ranks_with_data, stopped = found.tolist()
            self.is_stopped = stopped > 0
            if self.is_stopped or not ranks_with_data:
                return
            yield self._empty if batch is None else batch


class Evaluation:
    """Computes the held-out loss of a model, every `every` steps; 0 means only at the end."""

    def __init__(
        self, model: nn.Module, device: torch.device, held_out: HeldOut, every: int
    ) -> None:
        self._model, self._device = model, device
        self._held_out, self._every = held_out, every
        self._is_first = True

    def is_due(self, step: int) -> bool:
        """Whether the loss is computed after `step` steps, even if they are not the last."""
        return self._every > 0 and step > 0 and step % self._every == 0

    def run(self, step: int, stops: Callable[[], bool]) -> Evaluated | None:
        """The held-out loss after `step` steps, the same on all ranks, which all must call this.

        None if `stops` became true on any rank: then the evaluation is given up.
        """
        began, rounds = time.monotonic(), _Rounds(self._held_out, stops)
        with section("eval", slow=self._is_first), evaluating(self._model, self._device):
            total, tokens = self._sums(rounds)
        self._is_first = False
        if rounds.is_stopped:
            return None
        return self._mean(step, total, tokens, began)

    def _sums(self, rounds: _Rounds) -> tuple[float, int]:
        """The sums of the losses and of the tokens that count, on this rank."""
        loss_sum, total, tokens = loss_of(self._model), 0.0, 0
        pending = torch.zeros(())
        for batch in rounds:
            # A section of its own: time limits are those of one round.
            with section("eval", slow=self._is_first), micro_batch(self._model):
                tokens += batch.tokens
                part = loss_sum(*batch.to(self._device))
                # The host waits for the round before, so that the device always has work.
                total += float(pending)
                pending = part
        return total + float(pending), tokens

    def _mean(self, step: int, total: float, tokens: int, began: float) -> Evaluated:
        """The loss of all ranks, from the sums of this one."""
        mesh = strategy_of(self._model).mesh
        sums = torch.tensor([total, float(tokens)], dtype=torch.float64)
        shared_tree().all_reduce(sums)
        # Each rank of a tensor group has the loss of the group; each rank of a context group has
        # the loss of its part, and counted the tokens of all parts.
        loss, counted = sums[0] / mesh.tensor, sums[1] / mesh.inner
        return Evaluated(step, float(loss / counted), int(counted), time.monotonic() - began)
