"""Overhead of `[train.profile] every = …` on the steps that are not profiled.

    python benchmarks/profile_overhead.py [--json]

Two processes hold three training runs of the same model at once; one of them is profiled from time
to time. The runs alternate, a few steps each, in an order that changes from round to round. Only
rounds without profiling and analysis are compared: there, the profiled run only checks its
schedule. The ratio of two plain runs shows the noise, which is large on a shared machine. So the
time inside the profiler, per step and log line, is measured as well.

Also printed: how much longer all runs take while an analysis runs at the lowest priority on a
machine whose cores all train, and how much longer a step takes that is profiled or writes traces.
A run's own timings leave those steps out.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

# Make `benchmarks` importable when this file is run as a script.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.torchrun import run_two_ranks, send_result

# A turn is three steps. In one of `CYCLE` turns the profiler warms up, records and writes.
ROUNDS, STEPS, CYCLE = 120, 3, 12
# A small model: the shorter the step, the larger the relative overhead.
SIZES = {"layers": 4, "hidden": 128, "heads": 4, "ffn": 352, "vocab": 512}
SEQ_LEN, MICRO_BATCH = 128, 2
CONTESTANTS = ("plain", "plain again", "profiled")


class Contestant(NamedTuple):
    """One training run: runs a number of steps; seconds of its steps and of its profiler."""

    run: Callable[[int], None]
    profiler: Any
    step_s: list[float]
    profiler_s: list[float]


def contestant(name: str, rounds: int, folder: Path) -> Contestant:
    import torch

    from shardwise.engine.mesh import world
    from shardwise.engine.parallelize import parallelize
    from shardwise.engine.sync import strategy_of
    from shardwise.pytorch.build import build_module
    from shardwise.pytorch.device import local_device
    from shardwise.spec.model import ModelSpec
    from shardwise.spec.strategy import Strategy
    from shardwise.spec.train import TrainSettings
    from shardwise.trainer.data.batches import Layout, SyntheticBatches
    from shardwise.trainer.loop import Training, train
    from shardwise.trainer.optimizer import make_optimizer
    from shardwise.trainer.profile import StepProfiler, windows_of

    torch.manual_seed(0)
    module = build_module(ModelSpec.read({"family": "llama", "max_positions": SEQ_LEN, **SIZES}))
    every = STEPS * CYCLE
    chosen = TrainSettings.read(
        {
            "steps": (rounds + 2) * STEPS,
            "log_every": 1,
            "measure": False,
            "profile": {"after": every + 1, "every": every, "keep": 1},
        }
    )
    model = parallelize(module, Strategy(kind="zero3", param_dtype="fp32", micro_batch=MICRO_BATCH))
    training = Training(
        model=model,
        optimizer=make_optimizer(model, "adamw", chosen),
        batches=SyntheticBatches(Layout(*world(), MICRO_BATCH, 1, SEQ_LEN), SIZES["vocab"], 0),
        settings=chosen,
        device=local_device("cpu"),
    )
    profiler = None
    if name == "profiled":
        windows = windows_of(chosen)
        assert chosen.profile is not None
        assert windows is not None
        strategy = strategy_of(model)
        profiler = StepProfiler(chosen.profile, windows, folder, training.device, strategy)
    step_s: list[float] = []
    profiler_s: list[float] = []

    class Watcher:
        """The profiler calls that a run makes at each step and log line."""

        @contextmanager
        def step(self, step: int) -> Any:
            if profiler is not None:
                begin = time.perf_counter()
                profiler.step(step)
                profiler_s.append(time.perf_counter() - begin)
            yield

        def logged(self, line: Any) -> None:
            step_s.extend(line.step_s)
            if profiler is not None:
                begin = time.perf_counter()
                profiler.values()
                profiler_s[-1] += time.perf_counter() - begin

        def evaluated(self, found: Any) -> None:
            pass

    def run(steps: int) -> None:
        train(training, Watcher(), until=training.step + steps)

    return Contestant(run, profiler, step_s, profiler_s)


def worker(rounds: int, folder: Path) -> None:
    """Alternate between runs; rank 0 prints times of turns and steps, and when analyses ran."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    running = {name: contestant(name, rounds, folder) for name in CONTESTANTS}
    seconds: dict[str, list[float]] = {name: [] for name in running}
    cpu_s: dict[str, list[float]] = {name: [] for name in running}
    analysing: list[bool] = []
    for one in running.values():
        one.run(STEPS)  # warm-up
    for number in range(rounds):
        turn = number % len(running)
        order = [*running][turn:] + [*running][:turn]
        before = _analysing(folder)
        for name in order if number % 2 else reversed(order):
            dist.barrier()
            begin, worked = time.perf_counter(), time.process_time()
            running[name].run(STEPS)
            dist.barrier()
            seconds[name].append((time.perf_counter() - begin) / STEPS)
            cpu_s[name].append((time.process_time() - worked) / STEPS)
        analysing.append(before or _analysing(folder))
    running["profiled"].profiler.rest()
    if dist.get_rank() == 0:
        found = {
            "seconds": seconds,
            "cpu_s": cpu_s,
            "step_s": {name: one.step_s for name, one in running.items()},
            "profiler_s": running["profiled"].profiler_s,
            "analysing": analysing,
        }
        send_result(found)
    dist.barrier()
    os._exit(0)


def _analysing(folder: Path) -> bool:
    """Whether an analysis is running: its hidden result file is renamed when it is complete."""
    return any(folder.glob("traces/step-*/.summary"))


def measured(rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        arguments = ("--worker", folder, "--rounds", str(rounds))
        found: dict[str, Any] = run_two_ranks(__file__, *arguments)
    return found


def figures(found: dict[str, Any]) -> dict[str, Any]:
    seconds, analysing = found["seconds"], found["analysing"]
    rounds = range(len(analysing))
    plain, plain_cpu = _both(seconds), _both(found["cpu_s"])
    # The warm-up was the first turn, so round r begins with step (r + 1) * STEPS.
    profiled = [r for r in rounds if r + 1 >= CYCLE and (r + 1) % CYCLE == 0]
    calm = [r for r in rounds if r not in profiled and not analysing[r]]
    busy = [r for r in rounds if r not in profiled and analysing[r]]
    everyone = [statistics.geometric_mean(seconds[name][r] for name in CONTESTANTS) for r in rounds]

    def beside(values: list[float], r: int) -> float:
        """Median of nearby calm rounds: the machine's other load changes slowly."""
        near = [values[c] for c in calm if abs(c - r) < CYCLE]
        return statistics.median(near or [values[c] for c in calm])

    def of_steps(offset: int) -> float:
        steps = found["step_s"]["profiled"]
        ratios = [steps[(r + 1) * STEPS + offset] / beside(plain, r) for r in profiled]
        return statistics.median(ratios) if ratios else math.nan

    ratios = [seconds["profiled"][r] / plain[r] - 1 for r in calm]
    own = [found["profiler_s"][(r + 1) * STEPS + n] for r in calm for n in range(STEPS)]
    worked = [found["cpu_s"]["profiled"][r] / plain_cpu[r] - 1 for r in calm]
    noise = [seconds["plain again"][r] / seconds["plain"][r] - 1 for r in calm]
    slowed = [everyone[r] / beside(everyone, r) - 1 for r in busy]
    return {
        "overhead": statistics.median(ratios),
        "spread": _quartiles(ratios),
        "standard_error": _standard_error(ratios),
        "profiler_s": statistics.median(own),
        "cpu_overhead": statistics.median(worked),
        "cpu_spread": _quartiles(worked),
        "noise": statistics.median(noise),
        "noise_spread": _quartiles(noise),
        "rounds": len(calm),
        "step_s": statistics.median(plain),
        "during_analysis": statistics.median(slowed) if slowed else None,
        "during_analysis_spread": _quartiles(slowed) if slowed else None,
        "during_analysis_rounds": len(busy),
        "windows": len(profiled),
        "profiled_step_ratio": of_steps(1),
        "writing_step_ratio": of_steps(2),
    }


def _standard_error(values: list[float]) -> float:
    """Standard error of the median, from the distance of the quartiles."""
    low, high = _quartiles(values)
    return 0.93 * (high - low) / math.sqrt(len(values))


def _both(seconds: dict[str, list[float]]) -> list[float]:
    """Geometric mean of the two plain runs."""
    pairs = zip(seconds["plain"], seconds["plain again"], strict=True)
    return [math.sqrt(one * other) for one, other in pairs]


def _quartiles(values: list[float]) -> list[float]:
    ordered = sorted(values)
    return [ordered[len(ordered) // 4], ordered[3 * len(ordered) // 4]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        worker(options.rounds, options.worker)
        return
    result = figures(measured(options.rounds))
    if options.json:
        print(json.dumps(result, indent=2))
        return

    def shown(value: float, spread: list[float]) -> str:
        return f"{value:+.2%} (quartiles {spread[0]:+.2%} to {spread[1]:+.2%})"

    print(f"2 processes, steps of {result['step_s'] * 1e3:.1f} ms, measured:")
    print(
        f"wall-clock overhead of steps not profiled, {result['rounds']} rounds of {STEPS}: "
        f"{shown(result['overhead'], result['spread'])}, "
        f"standard error {result['standard_error']:.2%}"
    )
    print(f"CPU-time overhead: {shown(result['cpu_overhead'], result['cpu_spread'])}")
    share = result["profiler_s"] / result["step_s"]
    print(f"time inside the profiler: {result['profiler_s'] * 1e6:.0f} µs per step, {share:.3%}")
    print(f"noise (two plain runs): {shown(result['noise'], result['noise_spread'])}")
    if result["during_analysis"] is not None:
        print(
            f"all runs during an analysis, {result['during_analysis_rounds']} rounds: "
            f"{shown(result['during_analysis'], result['during_analysis_spread'])}"
        )
    print(
        f"a profiled step takes {result['profiled_step_ratio']:.2f} times as long, a step that "
        f"writes traces {result['writing_step_ratio']:.2f} times ({result['windows']} windows)"
    )


if __name__ == "__main__":
    main()
