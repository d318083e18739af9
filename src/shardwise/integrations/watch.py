"""`StepWatch`: what a step of someone else's loop should take, and what it takes."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from shardwise.engine.mesh import processes_per_node, world
from shardwise.engine.wrapped import (
    beside_gradients,
    keeps_two_gradients,
    read_strategy,
    sharded_traffic,
)
from shardwise.predict.estimate import price
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job, Optimizer
from shardwise.spec.lookup import find_cluster
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy, parse_precision
from shardwise.step import MemoryProfile, StepProfile
from shardwise.train.clock import StepClock
from shardwise.train.measure import StepMeter, measured_profile, norm_traffic, step_values
from shardwise.train.metrics import memory_now
from shardwise.train.start import this_machine
from shardwise.units.module import module_units

if TYPE_CHECKING:
    from rich.table import Table

# Where a loop does not say how long it is.
_ENDLESS = 2**62
PREFIX = "shardwise/"


class _Watched(NamedTuple):
    """What a meter looks at."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device


class StepWatch:
    """Watches the optimizer steps of a loop, on every rank.

    Make it from the model **before** anything wraps it, call `start` with what the loop trains,
    and wrap each optimizer step, with all its micro-batches, in `step`:

        watch = StepWatch(model, seq_len=2048, micro_batch=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        watch.start(model, optimizer)
        for batch in loader:
            with watch.step():
                ...
            values = watch.metrics()

    The third and the fifth step are counted and weighed, which makes them slow where there is no
    GPU; they, and those before, are left out of all times.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        seq_len: int,
        micro_batch: int = 1,
        accumulate: int = 1,
        optimizer: Optimizer = "adamw",
        precision: str | None = None,
        clips: bool = True,
        cluster: str | ClusterSpec | None = None,
        steps: int | None = None,
        inputs: Any = None,
        **strategy: object,
    ) -> None:
        """`seq_len` and `micro_batch` are of one forward on one device.

        `precision` is what a loop casts to without telling the model, by autocast; `clips` whether
        it computes the norm of the gradients. `cluster` names the devices, such as "8xH100-SXM",
        and is needed where they are GPUs. `inputs` are an example of two samples for models that
        do not take token ids. Any other field of Strategy that the model cannot tell, such as
        `recompute` or `grad_sync`, is given by its name.
        """
        self._skeleton = _without_data(model)
        self._job = Job(seq_len=seq_len, optimizer=optimizer)
        self._settings = {"micro_batch": micro_batch, "accumulate": accumulate, **strategy}
        if precision is not None:
            self._settings |= parse_precision(precision)
        self._cluster, self._inputs, self._clips = cluster, inputs, clips
        self._last = steps or _ENDLESS
        self._step = 0
        self._entered: ExitStack | None = None
        self._settled: list[float] = []
        self.predicted: StepProfile | None = None

    def start(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        step: int = 0,
        **strategy_fields: object,
    ) -> None:
        """The model as the loop trains it, its optimizer, and the step it begins with.

        Fields of Strategy given here go before those given when this was made.
        """
        device = next(model.parameters()).device
        strategy = read_strategy(model, **{**self._settings, **strategy_fields})
        cluster = _cluster_here(self._cluster, device)
        self._peak = cluster.device.known_peak_flops(strategy.param_dtype)
        self.predicted = self._predict(model, strategy, cluster)
        self._step = step
        watched = _Watched(model, optimizer, device)
        self._meter = StepMeter(watched, step, self._last, compiled=strategy.compile)
        self._device = device
        self._clock = StepClock(device)

    @contextmanager
    def step(self) -> Iterator[None]:
        """One optimizer step."""
        self.begin_step()
        try:
            yield
        finally:
            self.end_step()

    def begin_step(self) -> None:
        """For loops that cannot be wrapped: the step begins."""
        if self.predicted is None:
            raise SpecError("watch: call start(model, optimizer) before the first step")
        self._entered = ExitStack()
        self._entered.enter_context(self._meter.step(self._step + 1))

    def end_step(self) -> None:
        """The step that was begun has ended."""
        if self._entered is None:
            return
        self._entered.close()
        self._entered = None
        self._clock.mark()
        self._step += 1

    def skip(self) -> None:
        """The time since the last step belongs to no step: something was saved or evaluated."""
        self._clock.skip()

    def metrics(self) -> dict[str, float]:
        """Of the steps since the last call; without times while none says anything about the run.

        Rates are over all devices unless a name says otherwise; MFU is there where the peak of the
        device is known, by the convention in `predicted.work`.
        """
        settled = self._new_times()
        values = memory_now(self._device)
        if settled and self.predicted is not None:
            values |= step_values(self.predicted, settled, self._peak)
            if self.predicted.time is not None:
                values["predicted_step_s"] = self.predicted.time.step_s
        return {f"{PREFIX}{name}": value for name, value in values.items()}

    def measured(self) -> StepProfile | None:
        """The measured twin of `predicted`; None before the step that is weighed."""
        if self.predicted is None or not self._meter.finished:
            return None
        self._new_times()
        return measured_profile(self.predicted, self._meter, self._settled, self._peak)

    def table(self) -> Table | None:
        """Predicted against measured, term by term, for rich to print."""
        from shardwise.report.compare import comparison_table

        measured = self.measured()
        if measured is None or self.predicted is None:
            return None
        return comparison_table(self.predicted, measured)

    def _new_times(self) -> list[float]:
        times = self._clock.take()
        first = self._step - len(times) + 1
        settled = [s for step, s in enumerate(times, first) if self._meter.settled(step)]
        self._settled += settled
        return settled

    def _predict(self, model: nn.Module, strategy: Strategy, cluster: ClusterSpec) -> StepProfile:
        units = module_units(
            self._skeleton,
            self._job.seq_len,
            strategy.param_dtype,
            autocast=strategy.autocast,
            inputs=self._inputs,
        )
        profile = price(units, strategy, cluster, self._job, "traced module, as it is wrapped")
        if keeps_two_gradients(model) and strategy.accumulate > 1:
            profile = _with_second_gradients(profile)
        # Others may cut a model into other units than ours.
        traffic = sharded_traffic(model, strategy)
        if traffic is None:
            beside = beside_gradients(model, strategy)
            return profile._replace(traffic=(*profile.traffic, *beside))
        if self._clips and (strategy.shard or 1) > 1:
            tensors = sum(1 for p in model.parameters() if p.requires_grad)
            traffic = (*traffic, norm_traffic(strategy, tensors))
        return profile._replace(traffic=traffic)


def _with_second_gradients(profile: StepProfile) -> StepProfile:
    """Those of earlier micro-batches are alive beside the buckets when a backward peaks."""
    memory = profile.known_memory
    more = memory.terms.get("gradients", 0)
    terms = dict(memory.terms)
    terms["unsharded_gradients"] = terms.get("unsharded_gradients", 0) + more
    peak = memory.peak_allocated_bytes + more
    # What follows from the peak is not known anew.
    return profile._replace(memory=MemoryProfile(peak_allocated_bytes=peak, terms=terms))


def _without_data(model: nn.Module) -> nn.Module:
    """The same module with tensors on the meta device; nothing is copied."""
    empty: dict[int, Any] = {}
    for parameter in model.parameters():
        hollow = torch.empty_like(parameter, device="meta")
        empty[id(parameter)] = nn.Parameter(hollow, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        empty[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, empty)


def _cluster_here(cluster: str | ClusterSpec | None, device: torch.device) -> ClusterSpec:
    """The processes that are running, on the devices that were named."""
    _, size = world()
    per_node = processes_per_node()
    if cluster is None:
        if device.type != "cpu":
            raise SpecError("cluster: name the devices of this loop, such as cluster='8xH100-SXM'")
        return ClusterSpec(
            device=this_machine(per_node), nodes=size // per_node, devices_per_node=per_node
        )
    named = find_cluster(cluster) if isinstance(cluster, str) else cluster
    return named.but(nodes=size // per_node, devices_per_node=per_node)
