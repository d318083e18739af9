"""Every public name as a user would write it. `mypy --strict` reads this file; nothing runs it."""

from __future__ import annotations

from pathlib import Path

from torch import nn

import shardwise
from shardwise import (
    Budget,
    Candidate,
    Cluster,
    Comparison,
    Diagnosis,
    Exported,
    ImportedFile,
    Job,
    MemoryAnalysis,
    ModelSpec,
    Plan,
    RunSpec,
    SpecError,
    StepProfile,
    Strategy,
    Trace,
    TrainedRun,
)


def plan_it() -> Candidate | None:
    budget = Budget(tokens=1e12, price=2.5)
    plan: Plan = shardwise.plan(
        "llama-3-8b", "8xH100-SXM", seq_len=8192, global_batch="4M", objective="money",
        precision="bf16", optimizer="adamw", budget=budget, compile=True,
    )  # fmt: skip
    again = shardwise.plan(run=Path("run.toml"), low_precision_reduce=True)
    text: str = repr(again) + again._repr_html_() + str(plan.to_dict())
    return plan.winner if text else None


def plan_unequal_devices() -> float | None:
    unequal = shardwise.plan_parts("gpt2", "1x2xH100-SXM + 1x2xA100-80GB@100Gbps")
    return unequal.gain


def estimate_it(model: ModelSpec, cluster: Cluster) -> StepProfile:
    strategy = Strategy(kind="zero3", micro_batch=2, recompute="full")
    profile: StepProfile = shardwise.estimate(model, cluster, strategy)
    if profile.memory is not None and profile.time is not None:
        seconds: float = profile.time.step_s
        peak: int = profile.memory.peak_allocated_bytes
        assert seconds > 0
        assert peak > 0
    return shardwise.estimate(
        "llama-3-8b", "8xH100-SXM", "zero2", micro_batch=2, accumulate=4, recompute=0.5,
        reshard_after_forward=False, grad_sync="last", prefetch=2, offload=False,
        param_dtype="bf16", ddp_bucket_mib=25.0,
    )  # fmt: skip


def compare_them(first: StepProfile, second: StepProfile) -> list[str]:
    found: Comparison = shardwise.compare(first, second, names=["before", "after"])
    return [*found.names, found._repr_html_()]


def vary_it() -> list[float | None]:
    points = shardwise.whatif(
        "llama-3-8b", "4x8xH100-SXM@400Gbps", vary={"network": [100, 200], "seq_len": ["8Ki"]}
    )
    return [point.mfu for point in points["network"]]


def run_file(path: str) -> str:
    try:
        run: RunSpec = shardwise.read_run(path)
    except SpecError as error:
        return "\n".join(error.problems)
    job: Job = run.job
    assert job.seq_len
    return shardwise.write_run(run)


def train_it(model: nn.Module) -> nn.Module:
    sharded: nn.Module = shardwise.parallelize(model, "zero3", recompute="full", param_dtype="fp32")
    with shardwise.micro_batch(sharded, last=True):
        pass
    return sharded


VERSION: str = shardwise.__version__


def explain_it(run: Path) -> list[str]:
    checks: Diagnosis = shardwise.doctor(run)
    trained: TrainedRun = shardwise.train(run, nproc=2, steps=20, name="it")
    found: Trace = shardwise.trace(trained.folder, cluster="8xH100-SXM")
    memory: MemoryAnalysis = shardwise.memory("snapshot.pickle", capacity="80GiB", device=0)
    both: Comparison | None = trained.comparison
    shown = [repr(checks), found._repr_html_(), memory._repr_html_(), str(found.to_dict())]
    return shown if both is not None and checks.passed else []


def hand_over(run: RunSpec) -> RunSpec | None:
    written: Exported = shardwise.export(run, "slurm", partition="gpu", spares=1)
    written.write(Path(written.name))
    found: ImportedFile = shardwise.import_("accelerate.yaml", "llama-3-8b", "8xH100-SXM")
    return found.run
