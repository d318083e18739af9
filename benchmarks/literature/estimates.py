"""Figures that papers measured, from what `shardwise estimate` says of the same run.

A row of the data file gives the commands and names one of `QUANTITIES`, perhaps with a factor:
`20 * step_s`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.predict.api import estimate_run, replay_run
from shardwise.spec.model import ModelSpec
from shardwise.spec.question import describe_run
from shardwise.spec.run import RunSpec
from shardwise.step.profile import CollectiveProfile, StepProfile
from shardwise.units.load import load_units

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "shardwise estimate"
MIB, GB = 2.0**20, 1e9
# What `best_tokens_per_s` chooses from.
BATCHES, RECOMPUTE = (1, 2, 4, 8, 16, 32), ("none", "selective", "full")
# Terms of memory that are states, whole or divided.
STATES = ("parameters", "gradients", "optimizer", "unsharded_parameters", "unsharded_gradients")


@cache
def described(command: str, **more: Any) -> RunSpec:
    """The run of a command, as the command line would read it."""
    words = iter(shlex.split(command.removeprefix(COMMAND)))
    settings: dict[str, Any] = {}
    for word in words:
        if word.endswith(".toml"):
            settings["run"] = ROOT / word
        else:
            value = next(words)
            name = word.removeprefix("--").replace("-", "_")
            settings[name] = int(value) if value.isdigit() else value
    settings |= more
    model, cluster, strategy = (settings.pop(key, None) for key in ("model", "cluster", "strategy"))
    return describe_run(model, cluster, strategy, **settings)


@cache
def estimated(command: str) -> StepProfile:
    return estimate_run(described(command))


# ---- of one run -----------------------------------------------------------------------------


def step_s(command: str) -> float:
    time = estimated(command).time
    assert time is not None
    return time.step_s


def tokens_per_s(command: str) -> float:
    throughput = estimated(command).throughput
    assert throughput is not None
    return throughput.tokens_per_s


def teraflops(command: str) -> float:
    """Computed per second and device, recomputation included."""
    profile = estimated(command)
    assert profile.work is not None
    return profile.work.hardware_flops / step_s(command) / profile.cluster["devices"] / 1e12


def mfu(command: str) -> float:
    throughput = estimated(command).throughput
    assert throughput is not None
    assert throughput.mfu is not None
    return 100.0 * throughput.mfu


def hfu(command: str) -> float:
    throughput = estimated(command).throughput
    assert throughput is not None
    assert throughput.hfu is not None
    return 100.0 * throughput.hfu


def compute_s(command: str) -> float:
    time = estimated(command).time
    assert time is not None
    assert time.compute_s is not None
    return time.compute_s


def compute_share(command: str) -> float:
    return 100.0 * compute_s(command) / step_s(command)


def exposed_s(command: str) -> float:
    time = estimated(command).time
    assert time is not None
    assert time.exposed_communication_s is not None
    return time.exposed_communication_s


def communication_s(command: str) -> float:
    """Seconds of all collectives of a step, hidden or not."""
    timeline = replay_run(described(command))
    assert timeline is not None
    chosen = timeline.of_kind("communication")
    return float(np.sum((timeline.end_ns - timeline.start_ns)[chosen])) / 1e9


def hidden_share(command: str) -> float:
    return 100.0 * (1.0 - exposed_s(command) / communication_s(command))


def largest_collective(command: str) -> CollectiveProfile:
    return max(estimated(command).traffic, key=lambda one: one.bytes)


def collective_calls(command: str) -> float:
    """Calls of the collective that moves most."""
    return float(largest_collective(command).calls)


def collective_s(command: str) -> float:
    """Seconds of the collective that moves most, hidden or not."""
    timeline = replay_run(described(command))
    assert timeline is not None
    name = largest_collective(command).op.replace("_", "-")
    chosen = timeline.name == list(timeline.names).index(name)
    return float(np.sum((timeline.end_ns - timeline.start_ns)[chosen])) / 1e9


def moved_over_parameters(command: str) -> float:
    """Elements that collectives of a step move, over the parameters; all-reduces count twice."""
    profile = estimated(command)
    moved = sum(one.bytes * (2 if one.op == "all_reduce" else 1) for one in profile.traffic)
    return moved / (4.0 * profile.model["parameters"])


def peak_mib(command: str) -> float:
    return estimated(command).known_memory.peak_allocated_bytes / MIB


def states_gb(command: str) -> float:
    """Parameters, gradients and optimizer states at the peak, gathered ones too."""
    terms = estimated(command).known_memory.terms
    return sum(terms.get(name, 0) for name in STATES) / GB


def parameters_mib(command: str) -> float:
    return estimated(command).known_memory.terms["parameters"] / MIB


def optimizer_mib(command: str) -> float:
    return estimated(command).known_memory.terms["optimizer"] / MIB


def parameters_millions(command: str) -> float:
    return float(estimated(command).model["parameters"]) / 1e6


def block_bytes(command: str) -> float:
    """Activations that a block keeps per token and unit of width."""
    run = described(command)
    units = load_units(run.model, run.job.seq_len, run.strategy)
    assert isinstance(run.model, ModelSpec)
    return units.blocks[0].stage.kept["none"].activation_bytes / run.model.hidden


def verdict(command: str) -> str:
    return str(estimated(command).known_memory.verdict)


def best_tokens_per_s(command: str) -> float:
    """With the micro-batch and recompute that are fastest of those that fit."""
    runs = [described(command, micro_batch=b, recompute=r) for b in BATCHES for r in RECOMPUTE]
    profiles = [estimate_run(run) for run in runs]
    fitting = [one for one in profiles if one.known_memory.verdict == "fits"]
    return max(one.throughput.tokens_per_s for one in fitting if one.throughput)


# ---- of two runs ----------------------------------------------------------------------------


def times_faster(commands: Sequence[str]) -> float:
    """Tokens per second of the second run, over those of the first."""
    first, second = commands
    return tokens_per_s(second) / tokens_per_s(first)


def percent_faster(commands: Sequence[str]) -> float:
    return 100.0 * (times_faster(commands) - 1.0)


def times_faster_per_device(commands: Sequence[str]) -> float:
    first, second = (estimated(command).cluster["devices"] for command in commands)
    return times_faster(commands) * first / second


def percent_lost_per_device(commands: Sequence[str]) -> float:
    return 100.0 * (1.0 - times_faster_per_device(commands))


def best_percent_faster(commands: Sequence[str]) -> float:
    first, second = commands
    return 100.0 * (best_tokens_per_s(second) / best_tokens_per_s(first) - 1.0)


OF_ONE: dict[str, Callable[[str], float | str]] = {
    function.__name__: function
    for function in (
        step_s, tokens_per_s, teraflops, mfu, hfu, compute_s, compute_share, exposed_s,
        communication_s, hidden_share, collective_calls, collective_s,
        moved_over_parameters, peak_mib, states_gb, parameters_mib, optimizer_mib,
        parameters_millions, block_bytes, verdict,
    )
}  # fmt: skip
OF_TWO: dict[str, Callable[[Sequence[str]], float]] = {
    function.__name__: function
    for function in (
        times_faster, percent_faster, times_faster_per_device, percent_lost_per_device,
        best_percent_faster,
    )
}  # fmt: skip
