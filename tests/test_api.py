"""The package as Python users meet it: names, help, keywords, reprs, types."""

from __future__ import annotations

import ast
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardwise
from shardwise.spec.job import Job
from shardwise.spec.settings import JobSettings, PlanSettings, RunSettings, StrategySettings
from shardwise.spec.strategy import Strategy
from shardwise.trainer.api import CommandError
from tests.command import ROOT, environment
from tests.distributed.runs import write
from tests.observe.small import TRACE

TYPING = Path(__file__).parent / "typing"
FUNCTIONS = ("compare", "doctor", "estimate", "export", "import_", "memory", "micro_batch",
             "parallelize", "plan", "plan_parts", "read_run", "trace", "train", "whatif",
             "write_run")  # fmt: skip
TYPES = ("Budget", "Candidate", "Cluster", "Comparison", "Diagnosis", "Exported", "ImportedFile",
         "Job", "MemoryAnalysis", "ModelSpec", "Plan", "RunSpec", "SpecError", "StepProfile",
         "Strategy", "Trace", "TrainedRun")  # fmt: skip


def python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True)
    return done.stdout


def keywords_of(function: Any) -> set[str]:
    parameters = inspect.signature(function).parameters.values()
    assert all(p.kind is not p.VAR_KEYWORD for p in parameters)
    return {p.name for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_every_public_name_is_listed_and_can_be_imported() -> None:
    assert set(dir(shardwise)) == {*FUNCTIONS, *TYPES, "__version__"}
    for name in FUNCTIONS:
        assert callable(getattr(shardwise, name))
    for name in TYPES:
        assert isinstance(getattr(shardwise, name), type)
    with pytest.raises(AttributeError):
        shardwise.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_help_shows_the_functions_and_their_keywords() -> None:
    pytest.importorskip("torch")
    shown = python("import shardwise; help(shardwise)")
    for name in FUNCTIONS:
        assert f"    {name}(" in shown
    for name in (*TYPES, *RunSettings.__annotations__):
        assert name in shown
    # A person reads it: one tour and each function, not everything that classes inherit.
    assert len(shown.splitlines()) < 25 * len(FUNCTIONS)


def test_typed_keywords_are_the_fields_of_job_and_strategy() -> None:
    job, strategy = set(Job.model_fields), set(Strategy.model_fields) - {"kind"}
    assert set(JobSettings.__annotations__) == job
    assert set(StrategySettings.__annotations__) == strategy
    assert set(RunSettings.__annotations__) == {*job, *strategy, "precision", "adapter", "software"}
    assert job < set(PlanSettings.__annotations__) < set(RunSettings.__annotations__)
    assert keywords_of(shardwise.estimate) == {*RunSettings.__annotations__, "run", "measured"}
    assert set(PlanSettings.__annotations__) < keywords_of(shardwise.plan)
    assert set(PlanSettings.__annotations__) < keywords_of(shardwise.whatif)


def test_parallelize_takes_the_fields_of_strategy() -> None:
    pytest.importorskip("torch")
    assert keywords_of(shardwise.parallelize) == set(StrategySettings.__annotations__)


@pytest.mark.parametrize("function", [shardwise.estimate, shardwise.plan])
def test_an_unknown_keyword_gets_its_nearest(function: Any) -> None:
    with pytest.raises(TypeError, match="seqlen.*'seq_len'"):
        function("llama-3-8b", "8xH100-SXM", seqlen=8192)
    with pytest.raises(TypeError, match="zzz.*global_batch"):
        function("llama-3-8b", "8xH100-SXM", zzz=1)


def test_whatif_varies_each_quantity_alone() -> None:
    found = shardwise.whatif(
        "llama-3-8b", "2x8xH100-SXM@400Gbps", vary={"network": [50, 400], "seq_len": ["2Ki"]}
    )
    slow, fast = (point.candidate for point in found["network"])
    (short,) = found["seq_len"]
    assert slow is not None
    assert fast is not None
    assert slow.tokens_per_s < fast.tokens_per_s
    assert short.problem.job.seq_len == 2048
    assert short.problem.cluster.network == 400e9 / 8  # bytes per second


def test_compare_needs_two_profiles_and_a_name_for_each() -> None:
    profiles = [shardwise.estimate("gpt2", "8xH100-SXM", kind) for kind in ("ddp", "zero3")]
    both = shardwise.compare(*profiles)
    assert len(set(both.names)) == 2
    assert both.to_dict()[both.names[1]] == profiles[1].to_dict()
    with pytest.raises(shardwise.SpecError):
        shardwise.compare(profiles[0])
    with pytest.raises(shardwise.SpecError):
        shardwise.compare(*profiles, names=["one"])


def test_reprs_are_short() -> None:
    """A person reads them in a terminal: a few lines of 80 columns, for each of the records."""
    plan = shardwise.plan("llama-3-70b", "8x8xH100-SXM@400Gbps")
    profile = shardwise.estimate("llama-3-70b", "8x8xH100-SXM@400Gbps", "zero3", recompute="full")
    problem = plan.problem
    records = [plan, plan.winner, profile, problem.cluster, problem.job, problem.base]
    for record in records:
        assert len(repr(record)) < 320, repr(record)
    assert repr(problem.cluster) == "Cluster('8x8xH100-SXM@400Gbps')"
    assert repr(Strategy(kind="zero3", micro_batch=2)) == "Strategy(kind='zero3', micro_batch=2)"
    # Whatever differs from a default is there, so that equal reprs mean equal records.
    copied = eval(repr(problem.base), {"Strategy": Strategy})
    assert copied == problem.base
    for record in (plan, profile):
        assert "llama-3-70b" in repr(record)
        assert "8x8xH100-SXM@400Gbps" in repr(record)
    assert len(repr(shardwise.compare(profile, profile)).splitlines()) == 3


def test_a_run_is_exported_and_imported(tmp_path: Path) -> None:
    run = shardwise.plan("llama-3-8b", "8xH100-SXM").problem
    described = shardwise.RunSpec(run.model, run.cluster, run.job, Strategy(kind="zero3"))
    written = shardwise.export(described, "accelerate")
    written.write(tmp_path / written.name)
    found = shardwise.import_(tmp_path / written.name, "llama-3-8b", "8xH100-SXM")
    assert found.run is not None
    assert found.run.strategy.kind == "zero3"
    assert found.toml.count("\n# ") == len(found.summary) - 1
    assert not found.missing
    assert len(shardwise.import_(tmp_path / written.name).missing) == 2
    for record in (written, found):
        assert len(repr(record)) < 200


def test_traces_are_explained(tmp_path: Path) -> None:
    file = tmp_path / "rank0.json"
    file.write_text(json.dumps(TRACE))
    found = shardwise.trace(file)
    assert found.to_dict()["step_ns"] == found.health.step_ns
    assert repr(found).startswith("Trace: ")
    assert "<section>" in found._repr_html_()


@pytest.mark.nightly
def test_a_run_is_checked_in_processes_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = shardwise.doctor(write(tmp_path))
    assert found.passed
    assert repr(found).startswith("Diagnosis: passed")


def test_a_run_is_trained_in_processes_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    run = write(tmp_path)
    trained = shardwise.train(shardwise.read_run(run), nproc=2, name="it")
    assert (trained.reason, trained.steps) == ("done", 8)
    assert trained.comparison is not None
    assert (tmp_path / "runs" / "it" / "run.json").is_file()
    with pytest.raises(shardwise.SpecError):
        shardwise.train(tmp_path / "none.toml")
    with pytest.raises(CommandError, match="--name") as failed:
        shardwise.train(run, nproc=2, name="../it")
    assert failed.value.exit_code == 2


# The gate checks the types of the right calls with all others; this adds the wrong ones.
@pytest.mark.nightly
def test_the_public_api_passes_strict_type_checks() -> None:
    """And calls that are wrong do not: one error in each line that is."""
    pytest.importorskip("mypy")
    pytest.importorskip("torch")
    # The project's settings are strict too, and the gate has filled their cache.
    command = [sys.executable, "-m", "mypy", "--strict", "--output", "json"]
    # Named one by one: the settings leave the wrong calls out of a folder.
    files = [str(TYPING / name) for name in ("public_api.py", "wrong_calls.py")]
    done = subprocess.run(
        [*command, *files], cwd=ROOT, env=environment(), capture_output=True, text=True, check=False
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    wrong = (TYPING / "wrong_calls.py").read_text().splitlines()
    expected = {number for number, line in enumerate(wrong, start=1) if "# wrong" in line}
    assert {(Path(e["file"]).name, e["line"]) for e in found if e["severity"] == "error"} == {
        ("wrong_calls.py", number) for number in expected
    }, done.stdout + done.stderr
    used = {
        node.attr
        for node in ast.walk(ast.parse((TYPING / "public_api.py").read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert used >= set(FUNCTIONS)
