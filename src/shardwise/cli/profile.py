"""`shardwise profile`: a short run that is profiled, and what its traces say."""

from __future__ import annotations

from typing import Annotated

import typer

from shardwise.cli.output import JsonOption, print_json
from shardwise.cli.train import NameOption, ProcessesOption, RunFile

# Steps that nobody disturbs, so that their time can be told beside the profile.
_PLAIN_STEPS = 5


def profile(
    run: RunFile,
    nproc: ProcessesOption = None,
    after: Annotated[int, typer.Option(min=1, help="Steps before those profiled.")] = 5,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps to profile.")] = 3,
    memory: Annotated[
        bool, typer.Option("--memory", help="Record allocations too; slows the steps a little.")
    ] = False,
    name: NameOption = None,
    as_json: JsonOption = False,
) -> None:
    """Train a few steps of a run.toml under the profiler, and tell where their time went.

    One step of a run is counted and another weighed; what is profiled comes after both.
    """
    from shardwise.cli.long import needs_torch
    from shardwise.cli.train import launch_or_join, result_json, with_steps
    from shardwise.spec.record import SpecError
    from shardwise.spec.run import read_run
    from shardwise.spec.train import ProfileSettings, TrainSettings

    described = read_run(run)
    needs_torch()
    from shardwise.train.profile import first_profiled, moment_folder

    settings = described.train or TrainSettings()
    asked = settings.profile or ProfileSettings()
    first = first_profiled(after, settings.measure)
    described = with_steps(
        described,
        # In the step after those profiled, traces are written.
        first + steps + 1 + _PLAIN_STEPS,
        profile=asked.but(after=first, steps=steps, every=None, memory=memory or asked.memory),
        checkpoint=False,
    )
    arguments = ["profile", str(run), "--after", str(after), "--steps", str(steps)]
    arguments += ["--memory"] if memory else []
    result = launch_or_join(described, run, arguments, nproc, name, as_json)
    if result is None:
        return
    from shardwise.cli.trace import read_summary, summary_json
    from shardwise.observe.rules import Rules
    from shardwise.observe.run_folder import traces_in
    from shardwise.observe.why.verdicts import verdicts_of
    from shardwise.report.trace import print_trace

    traces = moment_folder(result.folder, first)
    files = traces_in(traces) if traces.is_dir() else []
    if not files:
        raise SpecError(
            f"profile: nothing was profiled, for the run ended after {result.steps} steps; give "
            f"it data for {first + steps}"
        )
    summary = read_summary(files, Rules(), None, quiet=as_json)
    thresholds = Rules().thresholds
    cluster = None if described.cluster.device.is_cpu else described.cluster
    verdicts = verdicts_of(summary, thresholds, cluster)
    if as_json:
        told = summary_json(summary, verdicts)
        print_json({**result_json(result), "traces": str(traces), "trace": told})
        return
    which = f"Step {first}" if steps == 1 else f"Steps {first} to {first + steps - 1}"
    typer.echo(f"\n{which}, profiled: {traces}\n")
    print_trace(summary, verdicts, thresholds, cluster)
