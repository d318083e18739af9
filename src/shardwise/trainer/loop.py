"""The training loop, top to bottom.

The host never waits for the device inside a step. Losses and norms stay on the device until a log
line needs them, a non-finite gradient cancels its own update on the device, and the values that
ranks must agree on travel between CPUs while the devices compute. Optimizers without a fused kernel
(low-bit states, Adafactor, Muon) are the exception: the host reads once per step whether to update.

Steps are counted from 1 wherever a number is shown or written: step N is the N-th update.
`Training.step` is the number of completed steps, which is also the step of a checkpoint.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from shardwise.engine.annotate import DATA, annotated
from shardwise.engine.loss import loss_of
from shardwise.engine.mesh import world
from shardwise.engine.routing_load import RoutingLoad
from shardwise.engine.sync import micro_batch, strategy_of
from shardwise.launch.heartbeat import report, resize_requested, section
from shardwise.spec.train import TrainSettings
from shardwise.trainer.agree import Agreement, Reason, StepDecision
from shardwise.trainer.clip import clip_gradients
from shardwise.trainer.clock import StepClock
from shardwise.trainer.data.batches import Batches, MicroBatch
from shardwise.trainer.evaluation import Evaluated, Evaluation
from shardwise.trainer.optimizer import clear_gradients, set_learning_rate
from shardwise.trainer.stop_signal import stop_on_signal

# Number of first steps that may be slow, since they compile and initialise.
SETTLED = 6


class NonFiniteError(RuntimeError):
    """A gradient was not finite; its update and all later ones were cancelled."""


@dataclass(kw_only=True)
class Training:
    """A model, its optimizer and its data, between two steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    settings: TrainSettings
    device: torch.device
    # Completed steps.
    step: int = 0
    # The signal that stopped the run, if any.
    stopped_by: int | None = None
    # Computes the held-out loss between steps; None without [eval].
    evaluation: Evaluation | None = None
    # The last held-out loss; None before the first.
    evaluated: Evaluated | None = None
    # State of this rank alone, as loaded from a checkpoint.
    rank_state: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Logged(NamedTuple):
    """Values of the steps since the last log line, up to and including `step`."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    # Tokens that counted for the loss, and the steps they are from.
    tokens: int
    steps: int
    skipped: int
    step_s: list[float]
    # How evenly tokens are spread over experts, by name; empty for a model without experts.
    routing: Mapping[str, float] = {}


class StepObserver(Protocol):
    """Observes the run: `step` wraps every step, `logged` receives the values of a log line.

    `evaluated` receives the held-out loss after a step, if the run has one.
    """

    def step(self, step: int) -> Any: ...

    def logged(self, line: Logged) -> None: ...

    def evaluated(self, found: Evaluated) -> None: ...


class Checkpoints(Protocol):
    """Saves the training. All ranks call these methods between the same steps."""

    def is_due(self, step: int) -> bool:
        """Whether this rank wants a checkpoint after `step` steps; one rank is enough."""
        ...

    def is_best(self, found: Evaluated) -> bool:
        """Whether to save now, because the held-out loss is the lowest so far."""
        ...

    def save(self, rank_state: Mapping[str, torch.Tensor], unchanged: bool = False) -> None:
        """Save the training, with the state of this rank alone.

        `unchanged` says that the caller does not change parameters before it calls `finish`. The
        save then continues in the background.
        """
        ...

    def wait_until_copied(self) -> None:
        """Wait until parameters may change again."""
        ...

    def finish(self) -> None:
        """Wait until the last save is complete."""
        ...


def train(
    training: Training,
    observer: StepObserver,
    checkpoints: Checkpoints | None = None,
    until: int | None = None,
) -> Reason:
    """Train up to and including step `until` (None: settings.steps); return why training ended."""
    t, settings = training, training.settings
    first, last = t.step, settings.steps if until is None else until
    window = LogWindow(t.device, t.rank_state, RoutingLoad.of(t.model))
    clock = StepClock(t.device)
    saver = Saver(t, window, checkpoints)
    update = Update(t, window, saver)

    with stop_on_signal() as received_signal:
        held_out = _HeldOutLoss(t, observer, saver, received_signal)

        def prepare(completed: int, slow: bool) -> tuple[list[MicroBatch], Agreement]:
            """Read the batches after `completed` steps, and start the agreement on that step."""
            with annotated(DATA), section("data", slow):
                batches = t.batches.at(completed)
            saves = completed > first and saver.is_due(completed)
            stops, copies = received_signal() is not None, strategy_of(t.model).mesh.inner
            return batches, Agreement(
                *(completed + 1, batches, stops, saves, copies, resize_requested()),
                fewer=t.batches.layout.fewer,
            )

        reason: Reason = "done"
        if first < last:
            batches, agreement = prepare(first, slow=True)
        while t.step < last:
            number = t.step + 1
            slow = t.step < first + SETTLED
            report(step=number)
            with section("agree", slow):
                agreed = agreement.result()
            agreed = held_out.compute_if_due(agreed, clock)
            if agreed.end:
                reason = agreed.end
                _set_signal(t, agreed.stop, received_signal())
                break
            if agreed.save:
                saver.save()
                clock.skip()
            current = batches
            with section("step", slow), observer.step(number):
                if number < last:
                    batches, agreement = prepare(number, slow)
                rate = update(current, agreed.tokens)
                clock.mark()
                logs = is_logged(number, settings)
                if logs:
                    line = window.report(number, rate, clock.take())
            t.step = number
            if logs:
                with section("log", slow=True):
                    observer.logged(line)
                saver.check()
        held_out.compute_last(reason)
        if t.step > first:
            saver.save()
        saver.finish()
    return reason


def _set_signal(training: Training, stop: bool, received: int | None) -> None:
    """Set and report the signal that stops the run; only another rank may have received one."""
    training.stopped_by = received or (signal.SIGTERM if stop else None)
    report(stopped_by=training.stopped_by or 0)


class _HeldOutLoss:
    """Computes the held-out loss of a training after steps; does nothing without [eval]."""

    def __init__(
        self,
        training: Training,
        observer: StepObserver,
        saver: Saver,
        received_signal: Callable[[], int | None],
    ) -> None:
        self._training, self._evaluation = training, training.evaluation
        self._observer, self._saver, self._received_signal = observer, saver, received_signal

    def compute_if_due(self, agreed: StepDecision, clock: StepClock) -> StepDecision:
        """Compute the loss of the current step if it is due; return what ranks have now agreed on.

        They save if it is the lowest. They stop if a signal ended the evaluation: the resumed run
        computes the loss.
        """
        step = self._training.step
        is_due = self._evaluation is not None and self._evaluation.is_due(step)
        if not is_due or self._is_known or agreed.end:
            return agreed
        is_computed = self._compute()
        clock.skip()
        if not is_computed:
            return agreed._replace(stop=True)
        return agreed._replace(save=agreed.save or self._is_best)

    def compute_last(self, reason: Reason) -> None:
        """Compute the loss after the last step of the run, unless it is known."""
        t = self._training
        is_last = t.step == t.settings.steps or reason == "data ended"
        if self._evaluation is not None and is_last and not self._is_known:
            self._compute()

    @property
    def _is_known(self) -> bool:
        found = self._training.evaluated
        return found is not None and found.step == self._training.step

    @property
    def _is_best(self) -> bool:
        found = self._training.evaluated
        return found is not None and self._saver.is_best(found)

    def _compute(self) -> bool:
        """Compute and report the loss; return whether it was not given up."""
        assert self._evaluation is not None
        self._saver.check()
        stops = self._received_signal
        found = self._evaluation.run(self._training.step, lambda: stops() is not None)
        if found is None:
            return False
        self._training.evaluated = found
        with section("log", slow=True):
            self._observer.evaluated(found)
        return True


class Saver:
    """Saves checkpoints, but only of finite parameters; does nothing if `checkpoints` is None."""

    def __init__(
        self, training: Training, window: LogWindow, checkpoints: Checkpoints | None
    ) -> None:
        self._training, self._window, self._checkpoints = training, window, checkpoints

    def is_due(self, step: int) -> bool:
        return self._checkpoints is not None and self._checkpoints.is_due(step)

    def is_best(self, found: Evaluated) -> bool:
        """Whether to save now, because the held-out loss is the lowest so far."""
        return self._checkpoints is not None and self._checkpoints.is_best(found)

    def check(self) -> None:
        """Raise NonFiniteError if a gradient was not finite; waits for the device."""
        try:
            self._window.check(self._training.step, self._training.settings)
        except NonFiniteError:
            # The last save is good, and may still be in progress.
            self.finish()
            raise

    def save(self, unchanged: bool = False) -> None:
        """Save; `unchanged` says that the caller does not change parameters before `finish`."""
        if self._checkpoints is not None:
            self.check()
            with section("save", slow=True):
                self._checkpoints.save(self._window.state(), unchanged)

    def wait_until_copied(self) -> None:
        """Wait until parameters may change without changing the save in progress."""
        if self._checkpoints is not None:
            with section("copy", slow=True):
                self._checkpoints.wait_until_copied()

    def finish(self) -> None:
        """Wait until the last save is complete."""
        if self._checkpoints is not None:
            with section("save", slow=True):
                self._checkpoints.finish()


class Update:
    """One update of the parameters from the micro-batches of a step."""

    def __init__(self, training: Training, window: LogWindow, saver: Saver) -> None:
        self._training, self._window, self._saver = training, window, saver
        self._parameters = [p for p in training.model.parameters() if p.requires_grad]
        self._loss_sum = loss_of(training.model, training.settings.balance_loss)
        mesh = strategy_of(training.model).mesh
        # Number of ranks over which the engine averages gradients.
        self._averaged = mesh.replicate * mesh.states

    def __call__(self, batches: Sequence[MicroBatch], tokens: int) -> float:
        """Update the parameters; return the learning rate. `tokens` counts all ranks' tokens."""
        return self.apply(self.gradients(batches, tokens), tokens)

    def gradients(
        self, batches: Sequence[MicroBatch], tokens: int, replicas: int = 1
    ) -> torch.Tensor:
        """Compute the gradients of a step; return this rank's part of the loss.

        The mean of the parts, over the ranks of all `replicas` groups, is the mean loss of the
        `tokens` of all. `replicas` is the number of groups that average gradients outside of the
        strategy's mesh.
        """
        t = self._training
        loss = torch.zeros((), device=t.device)
        for index, batch in enumerate(batches):
            with micro_batch(t.model, last=index == len(batches) - 1):
                # The loss is the mean over all tokens of the step on all ranks.
                share = replicas * self._averaged / tokens
                part = self._loss_sum(*batch.to(t.device)) * share
                part.backward()  # type: ignore[no-untyped-call]
            # Not in place, so that the sum takes the dtype of its parts.
            loss = loss + part.detach()
        return loss

    def apply(self, loss: torch.Tensor, tokens: int) -> float:
        """Clip gradients and update the parameters; return the learning rate. `loss` is logged."""
        t, settings = self._training, self._training.settings
        norm = clip_gradients(self._parameters, settings.clip_norm)
        cancelled = self._window.add(loss, norm, tokens, settings.non_finite == "stop")
        # Fused optimizers read this flag on the device and then change nothing.
        t.optimizer.found_inf = cancelled  # type: ignore[attr-defined]
        rate = settings.learning_rate_at(t.step)
        set_learning_rate(t.optimizer, rate)
        self._saver.wait_until_copied()
        t.optimizer.step()
        clear_gradients(t.model, t.optimizer)
        return rate


def is_logged(step: int, settings: TrainSettings) -> bool:
    """Whether a log line follows `step`, counted from 1: the first, the last, every log_every."""
    return step % settings.log_every == 0 or step in (1, settings.steps)


class LogWindow:
    """Loss, skipped updates, steps and tokens since the last log line, and the last gradient norm.

    Loss, skipped updates and tokens are sums. What is a tensor stays on the device until the line
    is written.
    """

    def __init__(
        self,
        device: torch.device,
        rank_state: Mapping[str, torch.Tensor],
        routing: RoutingLoad | None = None,
    ) -> None:
        self._device, self._routing = device, routing
        self._broken = torch.zeros((), device=device)
        self._clear()
        if "window" in rank_state:
            self.load(rank_state["window"])

    def load(self, sums: torch.Tensor) -> None:
        """Replace the sums by those that `state` returned, as `window`."""
        loss, norm, skipped, steps, tokens = sums.tolist()
        self._clear()
        self._loss += loss
        self._norm += norm
        self._skipped += skipped
        self._steps, self._tokens = int(steps), int(tokens)

    def _clear(self) -> None:
        self._loss = torch.zeros((), device=self._device, dtype=torch.float64)
        self._skipped = torch.zeros((), device=self._device)
        self._norm = torch.zeros((), device=self._device)
        self._steps = self._tokens = 0

    def add(
        self, loss: torch.Tensor, norm: torch.Tensor, tokens: int, cancel_rest: bool
    ) -> torch.Tensor:
        """Add a step; return a tensor that is 1 if its update must be cancelled, else 0.

        The norm covers all ranks, so all decide alike. With `cancel_rest`, a non-finite gradient
        also cancels all later updates.
        """
        bad = (~torch.isfinite(norm)).to(torch.float32).to(self._device)
        cancelled = torch.maximum(bad, self._broken)
        if cancel_rest:
            self._broken = cancelled
        self._loss += loss
        self._skipped += cancelled
        self._norm = norm
        self._steps += 1
        self._tokens += tokens
        return cancelled

    def state(self) -> dict[str, torch.Tensor]:
        """The values for a checkpoint, so that a resumed run logs the same lines.

        `window` is a float64 tensor of five: loss, gradient norm, skipped updates, steps and
        tokens.
        """
        sums = [self._loss, self._norm, self._skipped]
        values = [*(float(one) for one in sums), float(self._steps), float(self._tokens)]
        return {"window": torch.tensor(values, dtype=torch.float64)}

    def check(self, step: int, settings: TrainSettings) -> None:
        """Raise NonFiniteError if the run must stop; waits for the device.

        All ranks decide alike.
        """
        if settings.non_finite == "stop" and float(self._broken):
            raise NonFiniteError(
                f"A gradient was not finite in step {step} or shortly before; that update was not "
                "applied. Lower train.learning_rate or train.clip_norm, check the data, or set "
                'train.non_finite = "skip" to skip such updates'
            )

    def report(self, step: int, rate: float, step_s: list[float]) -> Logged:
        """Return the log line of the steps since the last one, and clear the sums.

        `rate` is the learning rate. All ranks must call this.
        """
        if world()[1] > 1:
            dist.all_reduce(self._loss)
        line = Logged(
            step=step,
            loss=float(self._loss) / world()[1] / self._steps,
            gradient_norm=float(self._norm),
            learning_rate=rate,
            tokens=self._tokens,
            steps=self._steps,
            skipped=int(self._skipped),
            step_s=step_s,
            routing=self._routing.take() if self._routing is not None else {},
        )
        self._clear()
        return line
