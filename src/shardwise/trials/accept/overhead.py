"""Overhead: the trainer's loop against a hand-written one.

The same processes hold both loops, with the same model, data, seed and settings. The loops
alternate, a few steps each, in an order that changes from round to round. A second instance of the
hand-written loop shows the noise.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from shardwise.trials.accept.line import Line, judge, not_run
from shardwise.trials.accept.machine import MAX_BUSY

if TYPE_CHECKING:
    import torch
    from torch import nn

    from shardwise.spec.model import ModelSpec
    from shardwise.spec.train import TrainSettings
    from shardwise.trainer.data.batches import Batches
    from shardwise.trials.accept.bench import Bench

BARE, AGAIN, OURS = "bare", "bare again", "shardwise"
ROUNDS, STEPS = 15, 3
# Largest relative slowdown of the trainer, beyond the noise of the rounds.
MAX_OVERHEAD = 0.03

# Runs a number of steps.
Loop = Callable[[int], None]


def check_overhead(bench: Bench) -> Iterator[Line]:
    """Compare the trainer's seconds per step with those of a hand-written loop."""
    what = "trainer against a bare loop"
    expected = f"≤ {MAX_OVERHEAD:.0%} slower"
    before = bench.busy_share()
    rounds = list(bench.on_ranks("shardwise.trials.accept.overhead:time_loops", {"rounds": ROUNDS}))
    busy = max(before, bench.busy_share())
    seconds = {name: [one[name] for one in rounds] for name in rounds[0]}
    found = slowdown(seconds)
    seen = f"{found.median:+.1%} (noise {found.noise:.1%})"
    figures = found._asdict()
    if busy > MAX_BUSY:
        yield not_run(
            what, expected, f"other processes use {busy:.0%} of the cores", seen, **figures
        )
        return
    passed = found.low - found.noise <= MAX_OVERHEAD
    yield judge(what, expected, seen, passed, "the trainer adds more", **figures)


class Slowdown(NamedTuple):
    """The trainer's relative slowdown over the rounds: its seconds over the baseline's, minus 1.

    The baseline is the hand-written loop.
    """

    median: float
    # Quartiles over the rounds.
    low: float
    high: float
    # Median relative difference of the two hand-written loops.
    noise: float


def slowdown(seconds: Mapping[str, Sequence[float]]) -> Slowdown:
    """The trainer's slowdown, from the seconds per step of each loop by round.

    The baseline is the geometric mean of both hand-written loops in the same round.
    """
    baseline = hand_written_means(seconds)
    ratios = sorted(own / base - 1 for own, base in zip(seconds[OURS], baseline, strict=True))
    pairs = zip(seconds[BARE], seconds[AGAIN], strict=True)
    noise = median(abs(math.log(one / other)) for one, other in pairs)
    count = len(ratios)
    return Slowdown(median(ratios), ratios[count // 4], ratios[3 * count // 4], noise)


def hand_written_means(seconds: Mapping[str, Sequence[float]]) -> list[float]:
    """The geometric mean of both hand-written loops' seconds per step, for each round."""
    pairs = zip(seconds[BARE], seconds[AGAIN], strict=True)
    return [math.sqrt(one * other) for one, other in pairs]


# ---- on ranks ------------------------------------------------------------------------------------


class Work(NamedTuple):
    """The model, the size of the batches, the steps and the device of every loop."""

    spec: ModelSpec
    seq_len: int
    micro_batch: int
    steps: int
    device: torch.device

    def module(self) -> nn.Module:
        """The model, with the same weights for every loop."""
        import torch

        from shardwise.pytorch.build import build_module

        torch.manual_seed(0)
        with self.device:
            return build_module(self.spec)

    def batches(self) -> Batches:
        from shardwise.engine.mesh import world
        from shardwise.trainer.data.batches import Layout, SyntheticBatches

        rank, size = world()
        layout = Layout(rank, size, self.micro_batch, 1, self.seq_len)
        return SyntheticBatches(layout, self.spec.vocab, 0)

    def settings(self) -> TrainSettings:
        from shardwise.spec.train import TrainSettings

        return TrainSettings(steps=self.steps, log_every=10, measure=False)

    @property
    def dtype(self) -> str:
        """bf16 on several GPUs, where FSDP gathers units in it; else fp32."""
        from shardwise.engine.mesh import world

        return "bf16" if self.device.type != "cpu" and world()[1] > 1 else "fp32"


def time_loops(case: Mapping[str, Any]) -> Iterator[dict[str, float]]:
    """Run all loops in turns; yield the seconds per step of each loop by name, for each round."""
    from shardwise.engine.mesh import join
    from shardwise.pytorch.device import is_accelerator, local_device
    from shardwise.trials.accept import workload

    device = local_device()
    join(device)
    on_gpu = is_accelerator(device)
    work = Work(
        spec=workload.model(is_cpu=not on_gpu),
        seq_len=workload.SEQ_LEN_ON_GPU if on_gpu else workload.SEQ_LEN_ON_CPU,
        micro_batch=workload.MICRO_BATCH_ON_GPU if on_gpu else workload.MICRO_BATCH_ON_CPU,
        steps=(case["rounds"] + 2) * STEPS,
        device=device,
    )
    loops = {BARE: bare_loop(work), AGAIN: bare_loop(work), OURS: trainer_loop(work)}
    yield from take_turns(loops, case["rounds"], device)


def take_turns(
    loops: Mapping[str, Loop], rounds: int, device: torch.device
) -> Iterator[dict[str, float]]:
    """Run every loop once per round, in a changing order; yield its seconds per step by name."""
    for run in loops.values():
        run(STEPS)  # warm-up
    for number in range(rounds):
        turn = number % len(loops)
        order = [*loops][turn:] + [*loops][:turn]
        seconds = {}
        for name in order if number % 2 else reversed(order):
            _wait_for_all(device)
            begin = time.perf_counter()
            loops[name](STEPS)
            _wait_for_all(device)
            seconds[name] = (time.perf_counter() - begin) / STEPS
        yield {name: seconds[name] for name in loops}


def _wait_for_all(device: torch.device) -> None:
    """Wait for the device and for all ranks."""
    import torch.distributed as dist

    from shardwise.pytorch.device import synchronize

    synchronize(device)
    if dist.is_initialized():
        dist.barrier()


def bare_loop(work: Work) -> Loop:
    """A careful hand-written loop: with fully_shard on several devices, without it on one."""
    import torch
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from shardwise.engine.mesh import world

    model: Any = work.module()
    if world()[1] > 1:
        low = torch.bfloat16 if work.dtype == "bf16" else None
        policy = MixedPrecisionPolicy(low, torch.float32 if low else None)
        for block in model.model.layers:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, reshard_after_forward=False, mp_policy=policy)
    return plain_loop(model, work)


def plain_loop(
    model: Any,
    work: Work,
    backward: Callable[[Any], None] = lambda loss: loss.backward(),
    setup: Callable[[Any], Any] = lambda optimizer: optimizer,
) -> Loop:
    """A loop that trains a model as it is, sharded or not.

    A framework may replace `backward`, which gets the loss, and wrap the optimizer in `setup`.
    """
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = setup(torch.optim.AdamW(groups, lr=3e-4, betas=(0.9, 0.95), fused=True))
    data, settings = work.batches(), work.settings()
    step = 0

    def run(steps: int) -> None:
        nonlocal step
        for _ in range(steps):
            batch = data.at(step)[0].to(work.device)
            logits = model(input_ids=batch.inputs).logits
            loss = cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten())
            del logits
            backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate_at(step)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 10 == 0:
                mean = loss.detach()
                if dist.is_initialized():
                    dist.all_reduce(mean)
                mean.item()

    return run


def trainer_loop(work: Work) -> Loop:
    """The training loop of `shardwise train`."""
    from shardwise.engine.mesh import resolve_for_world, world
    from shardwise.engine.parallelize import parallelize
    from shardwise.spec.strategy import Strategy
    from shardwise.trainer.loop import Training, train
    from shardwise.trainer.optimizer import make_optimizer

    kind = "zero3" if world()[1] > 1 else "single"
    strategy = Strategy.model_validate(
        {"kind": kind, "param_dtype": work.dtype, "micro_batch": work.micro_batch}
    )
    model = parallelize(work.module(), resolve_for_world(strategy), device=work.device)
    settings = work.settings()
    training = Training(
        model=model,
        optimizer=make_optimizer(model, "adamw", settings),
        batches=work.batches(),
        settings=settings,
        device=work.device,
    )

    class Silent:
        """Records nothing."""

        def step(self, step: int) -> Any:
            return nullcontext()

        def logged(self, line: Any) -> None:
            pass

        def evaluated(self, found: Any) -> None:
            pass

    def run(steps: int) -> None:
        train(training, Silent(), until=training.step + steps)

    return run
