"""Plan, run, measure and explain sharded data-parallel training on PyTorch.

Predict (needs neither a GPU nor torch):

    import shardwise

    plan = shardwise.plan("llama-3-8b", "8xH100-SXM")    # the best configuration, and why
    plan.winner.strategy, plan.winner.tokens_per_s
    profile = shardwise.estimate("llama-3-8b", "8xH100-SXM", "zero3", micro_batch=2)
    profile.memory.verdict, profile.throughput.mfu       # one configuration in detail
    shardwise.whatif("llama-3-8b", "4x8xH100-SXM@400Gbps", vary={"network": [100, 200]})
    shardwise.compare(profile, another)                  # profiles side by side

Train, check and explain (needs torch for the first two):

    trained = shardwise.train("run.toml")                # .predicted, .measured, .comparison
    shardwise.doctor("run.toml").passed                  # the run in miniature, before it costs
    shardwise.trace(trained.folder)                      # why it is slow, with the evidence
    shardwise.memory("snapshot.pickle", capacity="80GiB")

Other stacks:

    shardwise.export("run.toml", "accelerate").write("accelerate.yaml")
    shardwise.import_("accelerate.yaml", "llama-3-8b", "8xH100-SXM").run

Train with your own loop (needs torch; start it with torchrun):

    model = shardwise.parallelize(model, "zero3")
    with shardwise.micro_batch(model, last=True):
        model(batch).loss.backward()

Types, each with its own help(), such as help(shardwise.Strategy):

    Plan         answer of plan: winner, other layouts, reasons; .to_dict() for JSON
    Candidate    one configuration of a plan, with its step time, speed and memory
    Budget       tokens to train on, price per GPU-hour, deadline; for plan
    StepProfile  answer of estimate: memory, traffic, time; .to_dict() for JSON
    Comparison   answer of compare
    TrainedRun, Diagnosis, Trace, MemoryAnalysis, Exported, ImportedFile
                 answers of train, doctor, trace, memory, export and import_
    RunSpec      everything a run.toml holds; read_run and write_run
    ModelSpec, Cluster, Job, Strategy    the parts of a RunSpec
    SpecError    raised for invalid input; .problems has one sentence per problem

In a notebook a Plan, a StepProfile and a Comparison display as charts. The `shardwise`
command does the same and more (train, trace, report, ...): see `shardwise --help`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.spec.version import __version__ as __version__
from shardwise.step.notebook import register_renderer

if TYPE_CHECKING:
    from shardwise.engine.api import micro_batch, parallelize
    from shardwise.observe.analysis import Trace as Trace
    from shardwise.observe.api import trace
    from shardwise.observe.memory.analysis import MemoryAnalysis as MemoryAnalysis
    from shardwise.observe.memory.api import memory
    from shardwise.planning.api import estimate, plan, plan_parts, whatif
    from shardwise.planning.money import Budget as Budget
    from shardwise.planning.plan import Plan as Plan
    from shardwise.planning.rows import Candidate as Candidate
    from shardwise.spec.cluster import ClusterSpec
    from shardwise.spec.job import Job as Job
    from shardwise.spec.model import ModelSpec as ModelSpec
    from shardwise.spec.record import SpecError as SpecError
    from shardwise.spec.run import RunSpec as RunSpec
    from shardwise.spec.run import read_run, write_run
    from shardwise.spec.strategy import Strategy as Strategy
    from shardwise.stacks.read.api import ImportedFile as ImportedFile
    from shardwise.stacks.read.api import import_
    from shardwise.stacks.write.api import export
    from shardwise.stacks.write.exported import Exported as Exported
    from shardwise.step.comparison import Comparison as Comparison
    from shardwise.step.comparison import compare
    from shardwise.step.profile import StepProfile as StepProfile
    from shardwise.trainer.api import TrainedRun as TrainedRun
    from shardwise.trainer.api import train
    from shardwise.trials.doctor.api import Diagnosis as Diagnosis
    from shardwise.trials.doctor.api import doctor

    Cluster = ClusterSpec

# Functions only: help() prints every method that a class of this list inherits, thousands of lines.
# The types are as public; `_HOMES` lists both.
__all__ = [
    "compare",
    "doctor",
    "estimate",
    "export",
    "import_",
    "memory",
    "micro_batch",
    "parallelize",
    "plan",
    "plan_parts",
    "read_run",
    "trace",
    "train",
    "whatif",
    "write_run",
]

# Where each name is defined. Importing the package loads none of it: numpy, pydantic and torch are
# imported when a name that needs them is first used.
_HOMES = {
    "plan": "shardwise.planning.api.plan",
    "plan_parts": "shardwise.planning.api.plan_parts",
    "estimate": "shardwise.planning.api.estimate",
    "whatif": "shardwise.planning.api.whatif",
    "compare": "shardwise.step.comparison.compare",
    "read_run": "shardwise.spec.run.read_run",
    "write_run": "shardwise.spec.run.write_run",
    "train": "shardwise.trainer.api.train",
    "doctor": "shardwise.trials.doctor.api.doctor",
    "export": "shardwise.stacks.write.api.export",
    "import_": "shardwise.stacks.read.api.import_",
    "trace": "shardwise.observe.api.trace",
    "memory": "shardwise.observe.memory.api.memory",
    "parallelize": "shardwise.engine.api.parallelize",
    "micro_batch": "shardwise.engine.api.micro_batch",
    "Plan": "shardwise.planning.plan.Plan",
    "Candidate": "shardwise.planning.rows.Candidate",
    "Budget": "shardwise.planning.money.Budget",
    "StepProfile": "shardwise.step.profile.StepProfile",
    "Comparison": "shardwise.step.comparison.Comparison",
    "Exported": "shardwise.stacks.write.exported.Exported",
    "ImportedFile": "shardwise.stacks.read.api.ImportedFile",
    "TrainedRun": "shardwise.trainer.api.TrainedRun",
    "Diagnosis": "shardwise.trials.doctor.api.Diagnosis",
    "Trace": "shardwise.observe.analysis.Trace",
    "MemoryAnalysis": "shardwise.observe.memory.analysis.MemoryAnalysis",
    "RunSpec": "shardwise.spec.run.RunSpec",
    "ModelSpec": "shardwise.spec.model.ModelSpec",
    "Cluster": "shardwise.spec.cluster.ClusterSpec",
    "Job": "shardwise.spec.job.Job",
    "Strategy": "shardwise.spec.strategy.Strategy",
    "SpecError": "shardwise.spec.record.SpecError",
}


if not TYPE_CHECKING:  # a type checker would take any name for one that exists

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        module, _, attribute = _HOMES[name].rpartition(".")
        return getattr(import_module(module), attribute)


def _render(record: object) -> str:
    """HTML of a record; `report` is loaded when a notebook asks for it."""
    from shardwise.report.page.cell import record_cell

    return record_cell(record)


register_renderer(_render)


def __dir__() -> list[str]:
    return sorted([*_HOMES, "__version__"])
