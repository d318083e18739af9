"""Runs of Megatron-LM on one node of 8 B200, published beside the predictions of SimuMax.

Tensor with sequence parallelism, Ulysses for context parallelism, a distributed optimizer (ZeRO-1),
gradients accumulated and reduced in fp32, no recompute, nothing overlapped: the launch scripts of
the source say so, as well as sequence length 4,096 and micro-batch 1 where the table says nothing.

Three coefficients of the machine are fitted. Each model is predicted with those that the runs of
the other gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from benchmarks.multidim.fit import fit
from benchmarks.multidim.rows import (
    Layout,
    Measured,
    Numbers,
    Run,
    llama,
    read_table,
    summary,
    throughput_errors,
)
from shardwise.predict.configurations import Configurations
from shardwise.predict.kernels import coefficients_of
from shardwise.predict.program.step import Steps, emit_steps
from shardwise.predict.rates import Hardware
from shardwise.predict.time import steps_on
from shardwise.spec.catalogue import find_device, step_coefficients
from shardwise.spec.software import find_software
from shardwise.spec.strategy import Strategy
from shardwise.units.load import load_units

DEVICE, DEVICES, SEQ_LEN = find_device("B200"), 8, 4096
# Shapes of the source's configurations; 16 key-value heads for the larger one, as it has them.
SHAPES = {
    "llama3_70b": {"hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672},
    "llama3_405b": {"hidden": 16384, "heads": 128, "kv_heads": 16, "ffn": 53248},
}
VOCAB = 128256
# The form was chosen on the runs of this model.
CHOSEN_ON = "llama3_70b"


class Machine(NamedTuple):
    """What is fitted of the machine."""

    matmul_efficiency: float = 0.6
    attention_efficiency: float = 0.3
    exchange_efficiency: float = 0.5


def read_runs() -> tuple[list[Run], list[tuple[str, str]]]:
    """Dense runs without pipeline parallelism, and why the other ones are not predicted.

    The split of a run is its model.
    """
    runs, left_out = [], []
    for row in read_table("simumax_b200"):
        if row["pp"] != "1":
            continue
        if row["model"] not in SHAPES:
            left_out.append((row["case"], "expert parallelism and latent attention"))
        else:
            runs.append(_run(row))
    return runs, left_out


def _run(row: dict[str, str]) -> Run:
    seq_len = int(row["seq"] or SEQ_LEN)
    shape = SHAPES[row["model"]]
    model = llama(
        layers=int(row["layers_kept"]), vocab=VOCAB, max_positions=seq_len, tied=False, **shape
    )
    strategy = Strategy.read(
        {
            "kind": "zero1",
            "tensor": int(row["tp"]),
            "context": int(row["cp"]),
            "accumulate": int(row["micro_batches"]),
            "compile": True,
        }
    ).resolve(DEVICES, DEVICES)
    return Run(
        id=row["case"],
        split=row["model"],
        layout=Layout(model, seq_len, strategy, nodes=1),
        measured=Measured(step_s=float(row["real_step_ms"]) / 1e3),
    )


def step_s(steps: Sequence[Steps], machine: Machine) -> Numbers:
    """Seconds of steps with the coefficients of a machine."""
    peak = DEVICE.peak_flops("bf16")
    assert peak is not None
    hardware = Hardware(
        peak_flops=peak,
        memory_bandwidth=DEVICE.memory_bandwidth,
        link_bandwidth=DEVICE.link_bandwidth,
        network_bandwidth=DEVICE.link_bandwidth,
        devices_per_node=DEVICES,
    )
    software = find_software("megatron")
    known = coefficients_of(DEVICE, software, step_coefficients())
    k = known._replace(**machine._asdict())
    return np.asarray([float(steps_on(one, hardware, k).step_s[0]) for one in steps])


def steps_of(layouts: Sequence[Layout]) -> list[Steps]:
    """What each run does in a step, as for any other run."""
    return [
        emit_steps(
            load_units(layout.model, layout.seq_len, layout.strategy),
            Configurations.of([layout.strategy]),
            "adamw",
        )
        for layout in layouts
    ]


def fit_machine(runs: Sequence[Run]) -> Machine:
    return _fitted(tuple((run.layout, run.measured) for run in runs))


@cache
def _fitted(runs: tuple[tuple[Layout, Measured | None], ...]) -> Machine:
    """The same runs are fitted once, though two parts of a study ask for them."""
    steps = steps_of([layout for layout, _ in runs])
    measured = np.asarray([found.step_s for _, found in runs if found])
    return fit(Machine(), lambda machine: step_s(steps, machine), measured)


def judge_across(runs: Sequence[Run]) -> dict[str, Any]:
    """Each model with the coefficients that the other one's runs gave."""
    listed, machines = [], {}
    for name in SHAPES:
        others = [run for run in runs if run.split != name]
        judged = judge([run for run in runs if run.split == name], fit_machine(others))
        listed += judged["runs"]
        machines[name] = judged["machine"]
    errors = np.asarray([run["error"] for run in listed])
    return {**summary(errors), "machines": machines, "runs": listed}


def judge(runs: Sequence[Run], machine: Machine) -> dict[str, Any]:
    errors = throughput_errors(runs, step_s(steps_of([run.layout for run in runs]), machine))
    listed = [{"id": run.id, "error": float(e)} for run, e in zip(runs, errors, strict=True)]
    return {**summary(errors), "machine": machine._asdict(), "runs": listed}
