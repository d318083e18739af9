"""Read the arguments of `shardwise report` as subjects of a page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import Any

from shardwise.launch.command import start_command
from shardwise.observe.analysis import Trace, read_traces
from shardwise.observe.run_folder import (
    METRICS,
    TRACES,
    logged_values,
    profiled_windows,
    traces_in,
)
from shardwise.planning.api import plan_run
from shardwise.planning.plan import Plan
from shardwise.predict.api import estimate_run, replay_run
from shardwise.report.page.experts import ROUTING
from shardwise.report.page.subject import Subject
from shardwise.runs.find import contender_of
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.lookup import ModuleRef
from shardwise.spec.question import describe_run
from shardwise.spec.read_file import open_regular, parse_json, read_bytes, read_json
from shardwise.spec.record import SpecError
from shardwise.spec.run import RunSpec, read_run
from shardwise.step.profile import (
    StepProfile,
    TimeProfile,
    read_profile,
    read_profile_file,
    throughput_of,
)

# Larger JSON files are traces or mistakes; they are refused.
_MOST_BYTES = 64 * 2**20
_LONGEST_NAME = 80


def read_subjects(paths: Sequence[Path]) -> list[Subject]:
    """Read run folders, run.toml files, JSON and traces as subjects of a page.

    Consecutive traces are ranks of one run.
    """
    found: list[Subject] = []
    for traces, group in groupby(paths, key=_is_trace):
        if traces:
            found.append(_traces(list(group), None))
        else:
            for path in group:
                if not path.exists():
                    raise SpecError(f"{path}: no such file or folder")
                found += _folder(path) if path.is_dir() else _file(path)
    return found


def _is_trace(path: Path) -> bool:
    """Whether a file is a profiler trace, by its name or its first bytes."""
    if path.name.endswith(".json.gz"):
        return True
    if path.suffix != ".json" or not path.is_file():
        return False
    with open_regular(path) as file:
        return b'"traceEvents"' in file.read(1 << 20)


# ---- folders --------------------------------------------------------------------------------


def _folder(folder: Path) -> list[Subject]:
    """Read a run folder; or all runs, traces and profiles in a folder, noting skipped files."""
    plan = folder / "run.toml"
    if plan.is_file() and (folder / "prediction.json").is_file():
        return [_run_folder(folder, folder.name)]
    found = _file(plan) if plan.is_file() else []
    inner = sorted(
        file.parent for file in folder.glob("*/**/run.toml")
        if (file.parent / "prediction.json").is_file()
    )  # fmt: skip
    found += _folder_subjects(folder, inner)
    files = traces_in(folder)
    traces = [file for file in files if _is_trace(file)]
    if traces:
        found.append(_traces(traces, None, folder.name))
    left = []
    for file in (file for file in files if file not in traces):
        try:
            found += _file(file)
        except SpecError as error:
            left.append(f"Skipped {error.problems[0]}.")
    if not found:
        raise SpecError(
            left or f"{folder}: is not a run folder, and contains no runs, traces or profiles"
        )
    return [found[0]._replace(notes=(*found[0].notes, *left)), *found[1:]]


def _folder_subjects(folder: Path, runs: list[Path]) -> list[Subject]:
    """Read the runs in a folder; rounds of one contender of `compare` become one subject."""
    subjects = []
    # Only a single run gets a note that nothing was profiled.
    for contender, group in groupby(runs, key=contender_of):
        name = "/".join(contender.relative_to(folder).parts)
        rounds = [_run_folder(run, name, alone=False) for run in group]
        subjects.append(rounds[0] if len(rounds) == 1 else _median_round(rounds))
    return subjects


def _median_round(rounds: list[Subject]) -> Subject:
    """The round with the median step time; its spread is the range over all rounds."""
    timed = [r for r in rounds if r.measured is not None and r.measured.time is not None]
    if not timed:
        return rounds[0]
    lengths = [r.measured.time.step_s for r in timed if r.measured and r.measured.time]
    middle = median(lengths)
    one = timed[min(range(len(timed)), key=lambda i: abs(lengths[i] - middle))]
    measured = one.measured
    assert measured is not None
    time = TimeProfile(step_s=middle, step_s_spread=(min(lengths), max(lengths)))
    rates = measured.throughput
    if rates is not None and measured.work is not None:
        peak = None
        if rates.mfu:
            ideal = measured.work.model_flops / rates.mfu
            peak = ideal / one_step(measured) / int(measured.cluster["devices"])
        rates = throughput_of(measured.work, middle, int(measured.cluster["devices"]), peak)
    note = f"Median over {len(timed)} rounds; ranges are from the fastest to the slowest round."
    return one._replace(
        measured=measured._replace(time=time, throughput=rates), notes=(*one.notes, note)
    )


def one_step(profile: StepProfile) -> float:
    """Seconds per step of a profile with a known step time."""
    assert profile.time is not None
    return profile.time.step_s


def _run_folder(folder: Path, name: str, *, alone: bool = True) -> Subject:
    """Read a run folder; without profiled steps, a run that is `alone` notes how to profile."""
    run = read_run(folder / "run.toml").resolved()
    predicted = _saved_profile(folder / "prediction.json")
    measured = _saved_profile(folder / "measurement.json")
    windows = profiled_windows(folder / TRACES)
    traced = _trace_of(traces_in(windows[-1]), run.cluster) if windows else None
    simulated, notes = _simulated_timeline(run)
    if traced is None and alone:
        notes += (
            f"No profiled steps. To profile: shardwise train {folder / 'run.toml'} --profile 3",
        )
    return Subject(
        name=name,
        origin=str(folder),
        run=run,
        predicted=predicted or estimate_run(run),
        measured=measured,
        simulated=simulated,
        traced=traced,
        losses=logged_values(folder / METRICS, "loss"),
        held_out=logged_values(folder / METRICS, "eval_loss"),
        routing={name: logged_values(folder / METRICS, name) for name in ROUTING},
        commands=(f"shardwise train {folder / 'run.toml'} --name {folder.name}",),
        notes=notes,
    )


def _saved_profile(path: Path) -> StepProfile | None:
    """The profile saved at `path`; None if there is no such file."""
    return read_profile_file(path) if path.is_file() else None


# ---- files ----------------------------------------------------------------------------------


def _file(path: Path) -> list[Subject]:
    """Read a run.toml, or the JSON or JSON lines that a command printed with --json."""
    if path.suffix == ".toml":
        return [_planned_subject({"run": path}, path.stem, str(path))]
    if path.suffix not in (".json", ".jsonl"):
        raise SpecError(f"{path}: is not a run folder, a run.toml, a trace or the output of --json")
    if path.suffix == ".jsonl":
        lines = read_bytes(path, "report", _MOST_BYTES).splitlines()
        told = [parse_json(line, f"report: {path}") for line in lines if line.strip()]
    else:
        told = read_json(path, "report", _MOST_BYTES)
    return list(_json_subjects(told, path.stem, path))


def _json_subjects(told: Any, name: str, path: Path) -> Iterator[Subject]:
    """Subjects in parsed JSON: a profile, a prediction with its measurement, a plan, or a list."""
    if isinstance(told, list):
        if not told:
            raise SpecError(f"{path}: is an empty list")
        for number, one in enumerate(told, start=1):
            yield from _json_subjects(one, f"{name} {number}", path)
        return
    if not isinstance(told, Mapping):
        raise SpecError(f"{path}: contains neither profiles nor a plan")
    name = _short_name(str(told.get("name") or name))
    if "provenance" in told:
        profile = read_profile(told, str(path))
        one = Subject(name=name, origin=str(path))
        if profile.provenance.kind == "measured":
            yield one._replace(measured=profile)
        else:
            yield one._replace(predicted=profile)
    elif "predicted" in told or "measured" in told:
        mine, real = (
            read_profile(told[side], str(path)) if told.get(side) else None
            for side in ("predicted", "measured")
        )
        yield Subject(name=name, origin=str(path), predicted=mine, measured=real)
    elif {"winner", "layouts", "model", "cluster", "job"} <= set(told):
        # The page needs more than the JSON has: plan again, in half a second.
        job = told["job"] if isinstance(told["job"], Mapping) else {}
        settings = {k: job.get(k) for k in ("seq_len", "global_batch", "optimizer")}
        asked = {"model": str(told["model"]), "cluster": str(told["cluster"]), **settings}
        yield _planned_subject(asked, name, str(path), chosen=True)
    else:
        raise SpecError(
            f"{path}: is not the --json output of estimate, plan or train; pass such a file, a "
            "run.toml, a run folder or traces"
        )


def _short_name(name: str) -> str:
    """The name, cut to `_LONGEST_NAME` characters."""
    return name if len(name) <= _LONGEST_NAME else f"{name[:_LONGEST_NAME]}…"


def _planned_subject(
    asked: dict[str, Any], name: str, origin: str, chosen: bool = False
) -> Subject:
    """Subject of a run.toml or a plan, planned again from its settings.

    With `chosen`, the strategy of the winner replaces that of the run. `asked` has only settings
    that were given: the planner chooses all others.
    """
    run = describe_run(**asked)
    plan, notes = plan_of(run, asked)
    if chosen and plan is not None and plan.winner is not None:
        run = run._replace(strategy=plan.winner.strategy, job=plan.problem.job)
    simulated, more = _simulated_timeline(run)
    return Subject(
        name=run.model.name if chosen else name,
        origin=origin,
        run=run,
        predicted=estimate_run(run),
        plan=plan,
        simulated=simulated,
        commands=(start_command(run.cluster, Path(origin).with_suffix(".toml")),),
        notes=(*notes, *more),
    )


def plan_of(run: RunSpec, asked: dict[str, Any]) -> tuple[Plan | None, tuple[str, ...]]:
    """Plan for the given settings; or None and sentences that say why there is no plan."""
    if isinstance(run.model, ModuleRef):
        return None, ("No plan for a model of your own here; run 'shardwise plan'.",)
    try:
        return plan_run(**asked)[0], ()
    except SpecError as error:
        return None, tuple(f"No plan: {problem}." for problem in error.problems)


def _simulated_timeline(run: RunSpec) -> tuple[Any, tuple[str, ...]]:
    """The timeline of a simulated step; or None and a note on why there is none."""
    simulated = replay_run(run)
    if simulated is not None:
        return simulated, ()
    return None, (
        f"No simulated step: the speed of {run.cluster} is unknown; run 'shardwise calibrate'.",
    )


# ---- traces ---------------------------------------------------------------------------------


def _traces(paths: list[Path], cluster: ClusterSpec | None, name: str = "") -> Subject:
    """Subject of traces without a run, one file per rank."""
    origin = " ".join(map(str, paths[:3])) + (" …" if len(paths) > 3 else "")
    return Subject(
        name=name or paths[0].name.removesuffix(".gz").removesuffix(".json"),
        origin=origin,
        traced=_trace_of(paths, cluster),
        notes=("A trace alone has no prediction; pass the run folder to compare with one.",),
    )


def _trace_of(paths: list[Path], cluster: ClusterSpec | None) -> Trace | None:
    """The analysis of traces, one file per rank; None without files."""
    if not paths:
        return None
    known = cluster if cluster is not None and not cluster.device.is_cpu else None
    return read_traces(paths, cluster=known, timelines=True)
