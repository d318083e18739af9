"""`shardwise train`: train a run, launching its processes or joining them."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from shardwise.cli.launching import launch_or_join, result_json, with_steps
from shardwise.cli.options import NameOption, ProcessesOption, RunFile
from shardwise.cli.output import JsonOption, print_json

_Nnodes = Annotated[
    str | None,
    typer.Option(
        "--nnodes",
        help="Hosts that train together: 4, or 1:4 for any number between; default: "
        "PET_NNODES, or 1.",
        show_default=False,
    ),
]
_Steps = Annotated[int | None, typer.Option(min=1, help="Steps to train; overrides train.steps.")]
_Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Resume --name from its last intact checkpoint; starts it if new."
    ),
]
_Profile = Annotated[
    int | None,
    typer.Option(
        min=1, max=1000, help="Profile this many steps, stop, and show where their time goes."
    ),
]
_ProfileAfter = Annotated[int, typer.Option(min=1, help="With --profile: steps to run before.")]
_ProfileMemory = Annotated[
    bool,
    typer.Option(
        "--profile-memory",
        help="With --profile: record memory too; slows the profiled steps a little.",
    ),
]


def train(
    run: RunFile,
    nproc: ProcessesOption = None,
    name: NameOption = None,
    nnodes: _Nnodes = None,
    steps: _Steps = None,
    resume: _Resume = False,
    profile: _Profile = None,
    profile_after: _ProfileAfter = 5,
    profile_memory: _ProfileMemory = False,
    as_json: JsonOption = False,
) -> None:
    """Train a run.toml and compare prediction and measurement.

    Launches the processes itself; under torchrun, Slurm or Kubernetes it joins those already
    launched. Saves checkpoints, restarts after failures, and resumes from the last intact
    checkpoint. Ctrl-C, SIGTERM and SIGUSR1 save and stop.

    Exits with 1 if it failed, 3 if a restart would fail again (non-finite gradient, unequal data,
    no intact checkpoint), 128 + signal if a signal stopped it.
    """
    from shardwise.launch.environment import HOSTS
    from shardwise.spec.record import SpecError
    from shardwise.spec.run import read_run

    if nnodes is not None:
        os.environ[HOSTS] = nnodes
    if profile is not None:
        from shardwise.cli.profile import profile_steps

        if steps is not None or resume:
            given = "--steps" if steps is not None else "--resume"
            raise SpecError(f"{given}: --profile trains a few steps of its own; leave it out")
        profile_steps(
            *(run, nproc, profile_after, profile),
            memory=profile_memory, name=name, as_json=as_json,
        )  # fmt: skip
        return
    described = read_run(run)
    if resume and name is None:
        raise SpecError("--resume: needs the name of the run; add --name")
    if resume and described.train is not None and not described.train.checkpoint.save:
        raise SpecError("--resume: train.checkpoint is false, so no checkpoint exists; set it true")
    if steps:
        described = with_steps(described, steps)
    arguments = ["train", str(run), *(["--steps", str(steps)] if steps else [])]
    result = launch_or_join(described, run, arguments, nproc, name, as_json, resume)
    if as_json and result is not None:
        print_json(result_json(result))
