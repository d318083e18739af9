"""The training loop, top to bottom.

The host never waits for the device inside a step: losses and norms stay where they are made until
a log line asks for them, a gradient that is not finite calls off its own update on the device, and
what ranks must agree on travels between CPUs while the devices work.
"""

from __future__ import annotations

import inspect
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from shardwise.engine.annotate import DATA, annotated
from shardwise.engine.mesh import world
from shardwise.engine.sync import micro_batch
from shardwise.spec.train import TrainSettings
from shardwise.train.agree import Agreement
from shardwise.train.batches import IGNORED, Batches, MicroBatch
from shardwise.train.clock import StepClock
from shardwise.train.heartbeat import beat, section
from shardwise.train.optimizer import clear_gradients, set_learning_rate

# Steps after which nothing happens for the first time any more.
SETTLED = 6


class NonFiniteError(RuntimeError):
    """A gradient was not finite; no update was made from it, nor any after it."""


@dataclass(kw_only=True)
class Training:
    """A model, its optimizer and its data, between two steps."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Batches
    settings: TrainSettings
    device: torch.device
    step: int = 0
    # The signal that has ended it, if one has.
    stopped_by: int | None = None
    # What this rank once saved of its own, where it goes on from there.
    own: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Logged(NamedTuple):
    """What rank 0 tells of the steps since the last log line."""

    step: int
    loss: float
    gradient_norm: float
    learning_rate: float
    tokens: int
    skipped: int
    step_s: list[float]


class Watcher(Protocol):
    """Sees the run go by. `step` wraps every step; `logged` is told what a log line asks for."""

    def step(self, step: int) -> Any: ...

    def logged(self, line: Logged) -> None: ...


class Checkpoints(Protocol):
    """Keeps what steps leave behind. All ranks call these between the same steps."""

    def wanted(self, step: int) -> bool:
        """Whether this rank wants a save before `step`; one that does is enough."""
        ...

    def save(self, own: Mapping[str, torch.Tensor]) -> None:
        """What the training is now, and what this rank has of its own."""
        ...

    def settle(self) -> None:
        """Until parameters may change again."""
        ...

    def finish(self) -> None:
        """Until all that was saved is safe."""
        ...


def train(
    training: Training,
    watcher: Watcher,
    checkpoints: Checkpoints | None = None,
    until: int | None = None,
) -> str:
    """Train up to step `until`; returns why it ended: "done", "stopped" or "data ended"."""
    t, settings = training, training.settings
    first, last = t.step, settings.steps if until is None else until
    window = _Window(t.device, t.own)
    clock = StepClock(t.device)
    keeper = _Keeper(t, window, checkpoints)
    update = _Update(t, window, keeper)

    with stop_on_signal() as asked_to_stop:

        def prepare(step: int, slow: bool) -> tuple[list[MicroBatch], Agreement]:
            with annotated(DATA), section("data", slow):
                batches = t.batches.at(step)
            saves = step > first and keeper.wanted(step)
            return batches, Agreement(step, batches, asked_to_stop() is not None, saves)

        reason = "done"
        if first < last:
            batches, agreement = prepare(first, slow=True)
        while t.step < last:
            # The first steps compile, initialise and measure.
            slow = t.step < first + SETTLED
            beat(step=t.step)
            with section("agree", slow):
                agreed = agreement.result()
            if agreed.stop or agreed.micro_batches < 1:
                reason = "stopped" if agreed.stop else "data ended"
                t.stopped_by = asked_to_stop() or (signal.SIGTERM if agreed.stop else None)
                beat(stopped_by=t.stopped_by or 0)
                break
            if agreed.save:
                keeper.save()
                clock.skip()
            current = batches
            with section("step", slow), watcher.step(t.step):
                if t.step + 1 < last:
                    batches, agreement = prepare(t.step + 1, slow)
                rate = update(current, agreed.tokens)
                clock.mark()
                logs = is_logged(t.step, settings)
                if logs:
                    line = window.report(t.step, rate, clock.take())
            if logs:
                with section("log", slow=True):
                    watcher.logged(line)
                keeper.check()
            t.step += 1
        if t.step > first:
            keeper.save()
        keeper.finish()
    return reason


class _Keeper:
    """Saves what is good, where anything is saved."""

    def __init__(
        self, training: Training, window: _Window, checkpoints: Checkpoints | None
    ) -> None:
        self._training, self._window, self._checkpoints = training, window, checkpoints

    def wanted(self, step: int) -> bool:
        return self._checkpoints is not None and self._checkpoints.wanted(step)

    def check(self) -> None:
        """Raise NonFiniteError if there is a reason to; the device is waited for."""
        try:
            self._window.check(self._training.step, self._training.settings)
        except NonFiniteError:
            # What was saved before is good, and may not be on the device yet.
            self.finish()
            raise

    def save(self) -> None:
        if self._checkpoints is not None:
            self.check()
            with section("save", slow=True):
                self._checkpoints.save(self._window.state())

    def settle(self) -> None:
        if self._checkpoints is not None:
            with section("settle", slow=True):
                self._checkpoints.settle()

    def finish(self) -> None:
        if self._checkpoints is not None:
            with section("save", slow=True):
                self._checkpoints.finish()


class _Update:
    """One update of the parameters from the micro-batches of a step."""

    def __init__(self, training: Training, window: _Window, keeper: _Keeper) -> None:
        self._training, self._window, self._keeper = training, window, keeper
        self._parameters = [p for p in training.model.parameters() if p.requires_grad]
        self._forward = logits_of(training.model)

    def __call__(self, batches: Sequence[MicroBatch], tokens: int) -> float:
        """Returns the learning rate it was made with. `tokens` are those of all ranks."""
        t, settings = self._training, self._training.settings
        size = world()[1]
        loss = torch.zeros((), device=t.device)
        for index, batch in enumerate(batches):
            with micro_batch(t.model, last=index == len(batches) - 1):
                # The engine averages over ranks; the loss is a mean over all tokens of the step,
                # wherever they are.
                part = loss_sum(self._forward, batch, t.device) * (size / tokens)
                part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach()

        norm = global_norm(self._parameters)
        if settings.clip_norm:
            clip_grads_with_norm_(self._parameters, settings.clip_norm, norm)
        call_off = self._window.add(loss, norm, tokens, settings.non_finite == "stop")
        # Fused optimizers read this on the device and leave everything as it is.
        t.optimizer.found_inf = call_off  # type: ignore[attr-defined]
        rate = settings.learning_rate_at(t.step)
        set_learning_rate(t.optimizer, rate)
        self._keeper.settle()
        t.optimizer.step()
        clear_gradients(t.model, t.optimizer)
        return rate


def is_logged(step: int, settings: TrainSettings) -> bool:
    return (step + 1) % settings.log_every == 0 or step in (0, settings.steps - 1)


def logits_of(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """Token ids to logits, for a transformers model or any module that takes ids."""
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    named = "input_ids" in inspect.signature(inner.forward).parameters or hasattr(inner, "config")

    def forward(ids: torch.Tensor) -> torch.Tensor:
        output = model(input_ids=ids) if named else model(ids)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, torch.Tensor) or logits.ndim != 3:
            raise TypeError(
                f"{type(inner).__name__} returned {type(output).__name__}; the trainer needs "
                "logits of shape (batch, sequence, vocabulary)"
            )
        return logits

    return forward


def loss_sum(
    forward: Callable[[torch.Tensor], torch.Tensor], batch: MicroBatch, device: torch.device
) -> torch.Tensor:
    inputs = batch.inputs.to(device, non_blocking=True)
    targets = batch.targets.to(device, non_blocking=True)
    # In one expression, so that no name keeps the logits alive through the backward.
    return cross_entropy(
        _at_least_fp32(forward(inputs)).flatten(0, 1),
        targets.flatten(),
        reduction="sum",
        ignore_index=IGNORED,
    )


def _at_least_fp32(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def global_norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    """The norm of the whole gradient, the same on every rank."""
    norm: Any = get_total_norm([p.grad for p in parameters if p.grad is not None])
    whole: torch.Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return whole


class _Window:
    """Sums over the steps since the last log line, on the device."""

    def __init__(self, device: torch.device, own: Mapping[str, torch.Tensor]) -> None:
        self._device = device
        self._broken = torch.zeros((), device=device)
        self._clear()
        if "window" in own:
            loss, norm, skipped, steps, tokens = own["window"].tolist()
            self._loss += loss
            self._norm += norm
            self._skipped += skipped
            self._steps, self._tokens = int(steps), int(tokens)

    def _clear(self) -> None:
        self._loss = torch.zeros((), device=self._device, dtype=torch.float64)
        self._skipped = torch.zeros((), device=self._device)
        self._norm = torch.zeros((), device=self._device)
        self._steps = self._tokens = 0

    def add(self, loss: torch.Tensor, norm: torch.Tensor, tokens: int, stays: bool) -> torch.Tensor:
        """Note a step; returns 1 where its update must not happen, else 0.

        The norm is of all ranks, so all decide alike. With `stays`, one bad step calls off all
        that follow.
        """
        bad = (~torch.isfinite(norm)).to(torch.float32).to(self._device)
        call_off = torch.maximum(bad, self._broken)
        if stays:
            self._broken = call_off
        self._loss += loss
        self._skipped += call_off
        self._norm = norm
        self._steps += 1
        self._tokens += tokens
        return call_off

    def state(self) -> dict[str, torch.Tensor]:
        """What a run that goes on from here needs, so that its log lines are the same."""
        sums = [self._loss, self._norm, self._skipped]
        values = [*(float(one) for one in sums), float(self._steps), float(self._tokens)]
        return {"window": torch.tensor(values, dtype=torch.float64)}

    def check(self, step: int, settings: TrainSettings) -> None:
        """Raise if a gradient was not finite and the run is to stop then; the device is waited for.

        All ranks find the same.
        """
        if settings.non_finite == "stop" and float(self._broken):
            raise NonFiniteError(
                f"a gradient was not finite in one of the steps up to {step}; the "
                "parameters are those from before it. Lower train.learning_rate, clip "
                'harder, look at the data, or go on with train.non_finite = "skip"'
            )

    def report(self, step: int, rate: float, step_s: list[float]) -> Logged:
        """Read the sums; every rank takes part."""
        if world()[1] > 1:
            dist.all_reduce(self._loss)
        line = Logged(
            step=step,
            loss=float(self._loss) / world()[1] / self._steps,
            gradient_norm=float(self._norm),
            learning_rate=rate,
            tokens=self._tokens,
            skipped=int(self._skipped),
            step_s=step_s,
        )
        self._clear()
        return line


@contextmanager
def stop_on_signal() -> Iterator[Callable[[], int | None]]:
    """SIGTERM, SIGINT and SIGUSR1 ask for a stop that all ranks make at the same step.

    Yields what tells the signal that this process was sent, if one was.
    """
    import threading

    asked: list[int] = []
    with ExitStack() as restore:
        if threading.current_thread() is threading.main_thread():
            for name in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
                before = signal.signal(name, lambda number, _: asked.append(number))
                restore.callback(signal.signal, name, before)
        yield lambda: asked[0] if asked else None
