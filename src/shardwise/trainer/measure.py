"""Measure one step of a run as a StepProfile, comparable with the predicted one."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.engine.balance import counted_bytes
from shardwise.engine.compress import compression_state
from shardwise.engine.counter import CollectiveCounter
from shardwise.engine.expert import is_divided_expert
from shardwise.engine.ledger import UNSHARDED_TERM, LiveBytes
from shardwise.engine.local_parts import is_tensor_parallel
from shardwise.engine.mesh import EXPERT, EXPERT_SHARD
from shardwise.engine.routing_load import RoutingLoad
from shardwise.engine.wrapped import axes_of
from shardwise.pytorch.device import allocator_memory, is_accelerator, reset_peak_memory
from shardwise.pytorch.private import gathered_into, plain_tensors
from shardwise.spec.run import RunSpec
from shardwise.spec.strategy import Strategy
from shardwise.spec.train import TrainSettings
from shardwise.spec.version import __version__
from shardwise.step.profile import (
    CollectiveProfile,
    MemoryProfile,
    Provenance,
    StepProfile,
    TimeProfile,
    throughput_of,
)
from shardwise.trainer.agree import AGREEMENT_BYTES
from shardwise.trainer.clock import quantile
from shardwise.trainer.loop import is_logged

# Steps after the start in which traffic and memory are measured. The first steps differ: lazy
# initialisation, optimizer states, DDP's rebuilt buckets.
TRAFFIC_STEP, MEMORY_STEP = 3, 5
LOSS_BYTES = 8


class TrainedModel(Protocol):
    """A model with its optimizer and device, in Shardwise's training loop or another."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizer(self) -> torch.optim.Optimizer: ...

    @property
    def device(self) -> torch.device: ...


class StepMeter:
    """Counts the collectives of one early step and measures the memory of another.

    Steps are counted from 1; `completed` is the number of steps before this process, `last` the
    last step. Every rank measures, since a process sees only itself. Both steps are slower than
    others and are left out of timings.
    """

    def __init__(
        self, training: TrainedModel, completed: int, last: int, *, compiled: bool
    ) -> None:
        self._training = training
        self.traffic_step = min(completed + TRAFFIC_STEP, last)
        self.memory_step = min(completed + MEMORY_STEP, last)
        self.counter = CollectiveCounter(axes_of(training.model))
        self.memory: MemoryProfile | None = None
        self.finished = False
        self._ledger: LiveBytes | None = None
        self._entered = ExitStack()
        # Under a dispatch mode compiled code runs uncompiled, with other memory.
        self._uses_ledger = not is_accelerator(training.device) and not compiled

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Measure the step inside the context, if it is one of the two steps to measure."""
        if step == self.memory_step:
            reset_peak_memory(self._training.device)
        # One step earlier, to see the tensors that outlive a step.
        if step == max(1, self.memory_step - 1) and self._uses_ledger:
            gc.collect()
            self._ledger = self._entered.enter_context(LiveBytes(self._known(), draws=True))
        if step == self.memory_step and self._ledger is not None:
            # PowerSGD makes a new error in each step.
            kept = compression_state(self._training.model)
            self._ledger.assign(kept.values(), "reduce_buffers")
            self._ledger.assign(gathered_into(self._training.model), UNSHARDED_TERM)
            self._ledger.reset()
        with self.counter if step == self.traffic_step else ExitStack():
            yield
        if step == self.memory_step:
            if self._ledger is not None:
                self._ledger.finish()
            self._entered.close()
            self._read_memory()
            self.finished = True

    def settled(self, step: int) -> bool:
        """Whether the time of a step is representative: it comes after both measured steps."""
        return step > max(self.traffic_step, self.memory_step)

    def memory_curve(self) -> dict[str, Any] | None:
        """The content of memory.json: bytes by term during the memory step.

        None on a GPU, with compiled code, or if the step was not reached. Each point is [operation,
        bytes of every term]; the last is the end of the step.
        """
        if self._ledger is None or not self.finished:
            return None
        curve = self._ledger.curve
        terms = sorted({term for _, held in curve for term in held})
        return {
            "schema": 1,
            "kind": "measured",
            "rank": 0,
            "step": self.memory_step,
            "every": self._ledger.curve_every,
            "terms": terms,
            "points": [[at, *(held.get(term, 0) for term in terms)] for at, held in curve],
        }

    def _known(self) -> dict[str, list[torch.Tensor]]:
        """Parameters and optimizer states, by term."""
        states = [
            value
            for state in self._training.optimizer.state.values()
            for value in state.values()
            # Leaves out the step count of each parameter.
            if isinstance(value, torch.Tensor) and value.ndim
        ]
        return {"parameters": list(self._training.model.parameters()), "optimizer": states}

    def _read_memory(self) -> None:
        """Set `memory` from the live tensors (CPU) or from the caching allocator (GPU)."""
        if self._ledger is not None:
            terms = self._ledger.peak_terms
            self.memory = MemoryProfile(peak_allocated_bytes=sum(terms.values()), terms=terms)
        elif allocator := allocator_memory(self._training.device):
            peak, reserved = allocator.peak_allocated, allocator.peak_reserved
            resting = {
                name: sum(_bytes(tensor) for tensor in tensors)
                for name, tensors in self._known().items()
            }
            terms = {**resting, "working": peak - sum(resting.values())}
            self.memory = MemoryProfile(
                peak_allocated_bytes=peak, terms=terms, peak_reserved_bytes=(reserved, reserved)
            )


def measured_profile(
    predicted: StepProfile, meter: StepMeter, step_s: list[float], peak_flops: float | None
) -> StepProfile:
    """The measured profile of the step that `predicted` describes.

    `step_s` are seconds of representative steps, `peak_flops` FLOP/s of one device. Fields that
    were not measured are None.
    """
    time = throughput = None
    if step_s and predicted.work is not None:
        median = quantile(step_s, 0.5)
        spread = (quantile(step_s, 0.1), quantile(step_s, 0.9))
        time = TimeProfile(step_s=median, step_s_spread=spread)
        devices = int(predicted.cluster["devices"])
        throughput = throughput_of(predicted.work, median, devices, peak_flops)
    return predicted._replace(
        provenance=Provenance("measured", __version__, "the run itself"),
        memory=meter.memory,
        traffic=tuple(
            CollectiveProfile(op=op, group=axis, group_size=size, calls=n.calls, bytes=n.bytes)
            for (op, size, axis), n in sorted(meter.counter.counts.items())
        ),
        time=time,
        throughput=throughput,
        bottleneck=None,
        parts=None,
    )


def control_traffic(
    run: RunSpec, settings: TrainSettings, model: nn.Module, step: int
) -> tuple[CollectiveProfile, ...]:
    """The trainer's own small collectives in `step`, in addition to the strategy's.

    They are the agreement on the next step, the sum of the loss for a log line, and gradient norms.
    """
    strategy = run.strategy
    traffic = []
    if strategy.devices > 1:
        # Each step agrees on the next one; a log line sums the loss.
        agrees = step < settings.steps
        logs = is_logged(step, settings)
        small = AGREEMENT_BYTES * agrees + LOSS_BYTES * logs
        traffic.append(_all_reduce("world", strategy.devices, agrees + logs, small))
        if logs and (size := RoutingLoad.of(model).nbytes):
            traffic.append(_all_reduce("world", strategy.devices, 1, size))
        if settings.balance_loss == "global":
            traffic.append(balance_traffic(strategy, model))
    return (*traffic, *norm_traffic(strategy, model))


def balance_traffic(strategy: Strategy, model: nn.Module) -> CollectiveProfile:
    """The all-reduces of routers' counts, one of an integer per expert in each micro-batch."""
    calls = strategy.accumulate
    return _all_reduce("world", strategy.devices, calls, counted_bytes(model) * calls)


def norm_traffic(strategy: Strategy, model: nn.Module) -> tuple[CollectiveProfile, ...]:
    """The all-reduces of gradient norms, along each axis that divides gradients.

    One value per parameter, in one message for all that are divided by tensor parallelism, one for
    all experts that are divided, and one for all others.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    divided = sum(is_tensor_parallel(p) for p in trained)
    experts = sum(is_divided_expert(p) for p in trained)
    messages = [count for count in (divided, len(trained) - divided - experts) if count]
    width = 8 if strategy.master_dtype == "fp64" else 4
    mesh, traffic = strategy.mesh, []
    if strategy.sharded and mesh.states > 1:
        traffic.append(_all_reduce("shard", mesh.states, len(messages), width * sum(messages)))
    if divided:
        traffic.append(_all_reduce("tensor", mesh.tensor, 1, width * divided))
    if experts:
        sizes = {EXPERT_SHARD: mesh.states // strategy.expert, EXPERT: strategy.expert}
        traffic += [_all_reduce(a, n, 1, width * experts) for a, n in sizes.items() if n > 1]
    return tuple(traffic)


def counting_loss_tokens(profile: StepProfile, share: float) -> StepProfile:
    """The profile with its tokens and tokens/s multiplied by `share`.

    `share` is the share of positions that count for the loss. FLOPs and MFU stay those of all
    positions.
    """
    work, rates = profile.work, profile.throughput
    if work is not None:
        profile = profile._replace(work=work._replace(tokens=round(work.tokens * share)))
    if rates is not None:
        fewer = rates._replace(
            tokens_per_s=rates.tokens_per_s * share,
            tokens_per_s_per_device=rates.tokens_per_s_per_device * share,
        )
        profile = profile._replace(throughput=fewer)
    return profile


def step_values(
    predicted: StepProfile,
    step_s: list[float],
    peak_flops: float | None,
    tokens: float | None = None,
) -> dict[str, float]:
    """The time and throughput values of a log line, by name; empty if `step_s` is empty.

    `step_s` are seconds of representative steps, `peak_flops` FLOP/s of one device. `tokens` are
    the tokens of one step on all ranks that count for the loss; None takes the predicted number.
    """
    if not step_s or predicted.work is None:
        return {}
    median = quantile(step_s, 0.5)
    devices = int(predicted.cluster["devices"])
    rates = throughput_of(predicted.work, median, devices, peak_flops)
    tokens = predicted.work.tokens if tokens is None else tokens
    values = {
        "step_s": median,
        "step_s_p10": quantile(step_s, 0.1),
        "step_s_p90": quantile(step_s, 0.9),
        "tokens_per_s": tokens / median,
        "tokens_per_s_per_device": tokens / median / devices,
    }
    return values | ({"mfu": rates.mfu} if rates.mfu is not None else {})


def _all_reduce(group: str, size: int, calls: int, total: int) -> CollectiveProfile:
    """The profile of `calls` all-reduces that take `total` bytes together."""
    return CollectiveProfile(
        op="all_reduce", group=group, group_size=size, calls=calls, bytes=total
    )


def _bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's local part on an accelerator; 0 for a tensor on the CPU."""
    return sum(one.nbytes for one in plain_tensors(tensor) if is_accelerator(one.device))
