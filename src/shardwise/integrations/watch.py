"""`StepWatch`: predict and measure the steps of any training loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from shardwise.engine.mesh import processes_per_node, world
from shardwise.engine.wrapped import (
    casts_parameters,
    keeps_two_gradients,
    non_gradient_traffic,
    read_strategy,
    sharded_units,
    shards_along_rows,
)
from shardwise.predict.estimate import add_traffic, price, traffic_of
from shardwise.spec.catalogue import this_machine
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.job import Job
from shardwise.spec.lookup import find_cluster
from shardwise.spec.optimizer import Optimizer
from shardwise.spec.precision import parse_precision
from shardwise.spec.record import SpecError
from shardwise.spec.strategy import Strategy
from shardwise.step.profile import MemoryProfile, StepProfile
from shardwise.trainer.clock import StepClock
from shardwise.trainer.measure import StepMeter, measured_profile, norm_traffic, step_values
from shardwise.trainer.metrics import memory_now
from shardwise.units.module import module_units

if TYPE_CHECKING:
    from rich.table import Table

# The last step, if the length of the loop is unknown.
_UNLIMITED_STEPS = 2**62
PREFIX = "shardwise/"


class _TrainedModel(NamedTuple):
    """Model, optimizer and device of the loop, for StepMeter."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    device: torch.device


class StepWatch:
    """Predicts and measures the optimizer steps of a loop, on every rank.

    Create it from the model **before** anything wraps it. Call `start` with the wrapped model and
    the optimizer. Run each optimizer step, with all its micro-batches, inside `step`:

        watch = StepWatch(model, seq_len=2048, micro_batch=4)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        watch.start(model, optimizer)
        for batch in loader:
            with watch.step():
                ...
            values = watch.metrics()

    Collectives are counted in the third step and memory is measured in the fifth. This makes them
    slow on CPUs. Times exclude them and all steps before.
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
        """Describe the loop; `start` reads from the wrapped model what it shows.

        Args:
            model: The model before it is wrapped.
            seq_len: Sequence length of one forward, in tokens.
            micro_batch: Sequences of one forward on one device.
            accumulate: Micro-batches per optimizer step.
            optimizer: The optimizer's kind, which determines its state.
            precision: The autocast precision of the loop, if it uses autocast.
            clips: Whether the loop computes the gradient norm.
            cluster: The devices, such as "8xH100-SXM"; required for GPUs.
            steps: Optimizer steps of the loop, if known.
            inputs: Example inputs of two samples, for models that do not take token ids.
            strategy: Fields of Strategy that the model does not show, such as `recompute` or
                `grad_sync`.
        """
        self._skeleton = _meta_copy(model)
        self._job = Job(seq_len=seq_len, optimizer=optimizer)
        self._settings = {"micro_batch": micro_batch, "accumulate": accumulate, **strategy}
        if precision is not None:
            self._settings |= parse_precision(precision)
        self._cluster, self._inputs, self._clips = cluster, inputs, clips
        self._last = steps or _UNLIMITED_STEPS
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
        """Predict a step of the wrapped `model` and prepare to measure from step `step` on.

        Fields of Strategy given here override those given to the constructor.
        """
        device = next(model.parameters()).device
        strategy = read_strategy(model, **{**self._settings, **strategy_fields})
        cluster = _cluster_here(self._cluster, device)
        self._peak = cluster.device.known_peak_flops(strategy.param_dtype)
        self.predicted = self._predict(model, strategy, cluster)
        self._step = step
        trained = _TrainedModel(model, optimizer, device)
        self._meter = StepMeter(trained, step, self._last, compiled=strategy.compile)
        self._device = device
        self._clock = StepClock(device)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the optimizer step that runs in the body."""
        self.begin_step()
        try:
            yield
        finally:
            self.end_step()

    def begin_step(self) -> None:
        """Begin measuring an optimizer step, in loops that cannot use `step`."""
        if self.predicted is None:
            raise SpecError("watch: call start(model, optimizer) before the first step")
        self._entered = ExitStack()
        self._entered.enter_context(self._meter.step(self._step + 1))

    def end_step(self) -> None:
        """End the step that `begin_step` began."""
        if self._entered is None:
            return
        self._entered.close()
        self._entered = None
        self._clock.mark()
        self._step += 1

    def skip(self) -> None:
        """Exclude the time since the last step from measured step times, such as evaluation."""
        self._clock.skip()

    def metrics(self) -> dict[str, float]:
        """Metrics of the steps since the last call, named "shardwise/…".

        Memory in bytes always; times and rates only after the first representative step. Rates are
        over all devices unless a name says otherwise. MFU is included if the device peak is known;
        `predicted.work` says how FLOPs are counted.
        """
        settled = self._new_times()
        values = memory_now(self._device)
        if settled and self.predicted is not None:
            values |= step_values(self.predicted, settled, self._peak)
            if self.predicted.time is not None:
                values["predicted_step_s"] = self.predicted.time.step_s
        return {f"{PREFIX}{name}": value for name, value in values.items()}

    def measured(self) -> StepProfile | None:
        """The measured profile of a step; None before memory has been measured."""
        if self.predicted is None or not self._meter.finished:
            return None
        self._new_times()
        return measured_profile(self.predicted, self._meter, self._settled, self._peak)

    def table(self) -> Table | None:
        """A rich table of predicted against measured terms; None before the measurement."""
        from shardwise.report.compare import comparison_table

        measured = self.measured()
        if measured is None or self.predicted is None:
            return None
        return comparison_table(self.predicted, measured)

    def _new_times(self) -> list[float]:
        """Seconds of the representative steps since the last call; also kept for `measured`."""
        times = self._clock.take()
        first = self._step - len(times) + 1
        settled = [s for step, s in enumerate(times, first) if self._meter.settled(step)]
        self._settled += settled
        return settled

    def _predict(self, model: nn.Module, strategy: Strategy, cluster: ClusterSpec) -> StepProfile:
        """The predicted step of the wrapped model, with the collectives of its own sharding."""
        units = module_units(
            self._skeleton,
            self._job.seq_len,
            strategy.param_dtype,
            autocast=strategy.autocast,
            casts=casts_parameters(model),
            inputs=self._inputs,
        )
        if shards_along_rows(model):
            units = units.sharded_along_rows()
        profile = price(units, strategy, cluster, self._job, "traced module, wrapped by its loop")
        if keeps_two_gradients(model) and strategy.accumulate > 1:
            profile = _with_accumulated_gradients(profile)
        # Other code may shard a model in other units than Shardwise does.
        groups = sharded_units(model, strategy)
        traffic = add_traffic(traffic_of(units, own) for units, own in groups)
        if not groups:
            more = non_gradient_traffic(model, strategy)
            return profile._replace(traffic=(*profile.traffic, *more))
        if self._clips:
            traffic = (*traffic, *norm_traffic(strategy, model))
        return profile._replace(traffic=traffic)


def _with_accumulated_gradients(profile: StepProfile) -> StepProfile:
    """The profile with the accumulated `.grad` tensors added to its memory.

    They are alive together with DDP's buckets at the peak. Reserved memory and verdict are dropped.
    """
    memory = profile.known_memory
    more = memory.terms.get("gradients", 0)
    terms = dict(memory.terms)
    terms["unsharded_gradients"] = terms.get("unsharded_gradients", 0) + more
    peak = memory.peak_allocated_bytes + more
    # Reserved memory and verdict would have to be predicted again: leave them out.
    return profile._replace(memory=MemoryProfile(peak_allocated_bytes=peak, terms=terms))


def _meta_copy(model: nn.Module) -> nn.Module:
    """A copy of the module with its tensors on the meta device; no data is copied."""
    empty: dict[int, Any] = {}
    for parameter in model.parameters():
        meta = torch.empty_like(parameter, device="meta")
        empty[id(parameter)] = nn.Parameter(meta, requires_grad=parameter.requires_grad)
    for buffer in model.buffers():
        empty[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(model, empty)


def _cluster_here(cluster: str | ClusterSpec | None, device: torch.device) -> ClusterSpec:
    """The given cluster with as many nodes and devices as processes run.

    For None, a cluster of this machine's CPUs; SpecError for None on GPUs.
    """
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
