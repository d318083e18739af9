"""Folders as finished runs leave them, with chosen step times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from shardwise.predict.estimate import price
from shardwise.runs.record import NAME, SCHEMA, RunRecord
from shardwise.spec.run import RunSpec, run_from_dict, run_table, write_run
from shardwise.step.profile import (
    MemoryProfile,
    Provenance,
    StepProfile,
    TimeProfile,
    throughput_of,
)
from shardwise.units.load import load_units

ENVIRONMENT: dict[str, Any] = {
    "versions": {"python": "3.11.7", "shardwise": "0.1.0", "torch": "2.13.0+cu128"},
    "host": "node-17",
    "platform": "Linux-6.18.44-x86_64-with-glibc2.36",
    "cores": 64,
    "threads": 1,
    "gpus": ["NVIDIA GeForce RTX 4090"],
    "settings": {"OMP_NUM_THREADS": "1"},
}
# The model whose prediction stands for that of models that would have to be traced.
STAND_IN = "gpt2"


def run_of(
    cluster: Any = "1x1xRTX-4090", model: Any = "gpt2", adapter: Any = None, **strategy: Any
) -> RunSpec:
    sections: dict[str, Any] = {
        "model": model,
        "cluster": cluster,
        "job": {"seq_len": 512},
        "strategy": {"kind": "single", **strategy},
        "train": {"steps": 20},
        "data": {"path": "corpus.txt"},
    }
    if adapter is not None:
        sections["adapter"] = adapter
    return run_from_dict(sections).resolved()


def predicted_step(run: RunSpec) -> StepProfile:
    by_formulas = hasattr(run.model, "layers") and not (run.adapter and run.adapter.train)
    model = run.model if by_formulas else run_of(model=STAND_IN).model
    units = load_units(model, run.job.seq_len, run.strategy)
    return price(units, run.strategy, run.cluster, run.job, "formulas")


def write_folder(folder: Path, run: RunSpec, slowdown: float = 1.1) -> Path:
    """A folder whose measured step took `slowdown` times the predicted one."""
    folder.mkdir(parents=True)
    predicted = predicted_step(run)
    assert predicted.time is not None
    assert predicted.work is not None
    assert predicted.memory is not None
    step_s = slowdown * predicted.time.step_s
    peak = run.cluster.device.known_peak_flops(run.strategy.param_dtype)
    memory = predicted.memory
    measured = predicted._replace(
        provenance=Provenance("measured", "0.1.0", "the run itself"),
        memory=MemoryProfile(memory.peak_allocated_bytes, memory.terms),
        time=TimeProfile(step_s, step_s_spread=(0.98 * step_s, 1.05 * step_s)),
        throughput=throughput_of(predicted.work, step_s, run.cluster.devices, peak),
        bottleneck=None,
    )
    record = RunRecord(
        schema=SCHEMA, name=folder.name, state="done", started=1.0, updated=2.0, step=20,
        planned_steps=20, model="custom", parameters=1, strategy="single", cluster="a cluster",
        devices=run.cluster.devices, version="0.1.0", checkpoint="runs/it/step-20",
        settings=run_table(run),
    )  # fmt: skip
    (folder / "run.toml").write_text(write_run(run))
    (folder / NAME).write_bytes(msgspec.json.encode(record))
    for name, content in (
        ("prediction", predicted.to_dict()),
        ("measurement", measured.to_dict()),
        ("environment", ENVIRONMENT),
    ):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
