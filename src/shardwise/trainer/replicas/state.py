"""The state of a rank, which heals the rank of the same number in another replica group."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardwise.checkpoint.dcp import state as saved_state
from shardwise.checkpoint.format.pieces import Tensor
from shardwise.engine.mesh import world
from shardwise.pytorch.private import local_tensor
from shardwise.spec.record import SpecError
from shardwise.trainer.loop import LogWindow, Training

_STEP, _WINDOW, _RUN = "step", "window", "run."


class HealingState:
    """Reads and replaces all state of one rank that training changes."""

    def __init__(self, training: Training, window: LogWindow, digest: int) -> None:
        self._training, self._window = training, window
        # A tensor without elements, whose name identifies the run.
        self._run = {f"{_RUN}{digest}": torch.empty(0)}

    def tensors(self) -> dict[str, torch.Tensor]:
        """All state of this rank, by name.

        Parameters, optimizer states, buffers, random states, the sums of the log, and the step.
        """
        t = self._training
        alone = {**self._window.state(), _STEP: torch.tensor([t.step])}
        return {
            **saved_state.updated_tensors(t.model, t.optimizer),
            # A forward pass may change them while they are sent.
            **{name: one.clone() for name, one in saved_state.buffers_of(t.model).items()},
            **saved_state.rank_state(world()[0], t.device, alone),
            **self._run,
        }

    def allocate(self, offered: Mapping[str, Tensor]) -> Mapping[str, torch.Tensor]:
        """This rank's tensors, by name, to receive the state that another group offers into.

        Raises SpecError if that group trains another run.
        """
        t = self._training
        if {name for name in offered if name.startswith(_RUN)} != self._run.keys():
            raise SpecError(
                "this replica group trains another run than those that train already; start all "
                "groups with the same run.toml"
            )
        if not t.optimizer.state:
            saved_state.make_optimizer_state(t.model, t.optimizer, offered)
        return self.tensors()

    def load(self, received: Mapping[str, torch.Tensor]) -> None:
        """Replace the state of this rank by the verified state that another group sent."""
        t = self._training
        own = {
            **saved_state.updated_tensors(t.model, t.optimizer),
            **saved_state.buffers_of(t.model),
        }
        with torch.no_grad():
            for name, tensor in own.items():
                local_tensor(tensor).copy_(received[name])
        prefix = f"{saved_state.RANK}.{world()[0]}."
        alone = {n.removeprefix(prefix): x for n, x in received.items() if n.startswith(prefix)}
        self._window.load(alone[_WINDOW])
        saved_state.restore_random(alone, t.device)
        t.step = int(alone[_STEP])
