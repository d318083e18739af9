"""`shardwise train --profile`, once `shardwise profile`: train a few steps under the profiler."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.options import NameOption, ProcessesOption, RunFile
from shardwise.cli.output import JsonOption, print_json
from shardwise.spec.foreign_text import echo

if TYPE_CHECKING:
    from shardwise.observe.analysis import Trace
    from shardwise.spec.cluster import ClusterSpec

# Steps without the profiler, to measure the undisturbed step time too.
_PLAIN_STEPS = 5


def profile(
    run: RunFile,
    nproc: ProcessesOption = None,
    after: Annotated[int, typer.Option(min=1, help="Steps to run before profiling.")] = 5,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps to profile.")] = 3,
    memory: Annotated[
        bool, typer.Option("--memory", help="Record memory too; slows the profiled steps a little.")
    ] = False,
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Profile a few steps of a run and show where their time goes.

    Profiled steps come after those in which collectives are counted and memory is measured.
    """
    profile_steps(run, nproc, after, steps, memory=memory, name=name, as_json=as_json)


def profile_steps(
    run: Path,
    nproc: int | None,
    after: int,
    steps: int,
    *,
    memory: bool,
    name: str | None,
    as_json: bool,
) -> None:
    """Train, profile `steps` steps after at least `after` steps, and print their analysis.

    Does not profile the steps in which collectives are counted and memory is measured.
    """
    from shardwise.cli.launching import launch_or_join, result_json, with_steps
    from shardwise.cli.long import needs_torch
    from shardwise.spec.run import read_run
    from shardwise.spec.train import ProfileSettings, TrainSettings

    described = read_run(run)
    needs_torch()
    from shardwise.trainer.profile import steps_before_profile, window_folder

    settings = described.train or TrainSettings()
    requested = settings.profile or ProfileSettings()
    before = steps_before_profile(after, settings.measure)
    first = before + 1
    described = with_steps(
        described._replace(eval=None),
        # Traces are written in the step after the profiled ones.
        before + steps + 1 + _PLAIN_STEPS,
        profile=requested.but(
            after=before, steps=steps, every=None, memory=memory or requested.memory
        ),
        checkpoint=False,
    )
    arguments = ["train", str(run), "--profile", str(steps), "--profile-after", str(after)]
    arguments += ["--profile-memory"] if memory else []
    result = launch_or_join(described, run, arguments, nproc, name, as_json)
    if result is None:
        return
    traces = window_folder(result.folder, first)
    cluster = None if described.cluster.device.is_cpu else described.cluster
    found = _read_traces(traces, cluster, result.steps, before + steps, quiet=as_json)
    if as_json:
        print_json({**result_json(result), "traces": str(traces), "trace": found.to_dict()})
        return
    from shardwise.report.trace import print_trace

    which = f"step {first}" if steps == 1 else f"steps {first} to {first + steps - 1}"
    echo(f"\nProfiled {which}; traces in {traces}\n")
    print_trace(found)


def _read_traces(
    folder: Path, cluster: ClusterSpec | None, trained: int, needed: int, *, quiet: bool
) -> Trace:
    """The analysis of the traces in a folder; SpecError if there are none.

    `trained` is the number of steps that the run made, `needed` that after which it had traces.
    """
    from shardwise.cli.trace import read_with_progress
    from shardwise.observe.rules import Rules
    from shardwise.observe.run_folder import traces_in
    from shardwise.spec.record import SpecError

    files = traces_in(folder) if folder.is_dir() else []
    if not files:
        raise SpecError(
            f"profile: the run ended after {trained} steps, before any was profiled; give it "
            f"data for {needed} steps, or lower --profile-after"
        )
    return read_with_progress(files, Rules(), cluster, quiet=quiet)
