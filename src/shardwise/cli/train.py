"""`shardwise train`: run it, launching the processes or joining them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.output import JsonOption, print_json

if TYPE_CHECKING:
    from shardwise.spec.run import RunSpec
    from shardwise.train.run import Result

RunFile = Annotated[Path, typer.Argument(help="The run.toml.", show_default=False)]
ProcessesOption = Annotated[
    int | None,
    typer.Option(
        "--nproc", min=1, help="Processes on this machine; the cluster's devices per node."
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--name", help="Name of the run's folder; without it, the file's name and the time."
    ),
]


def train(
    run: RunFile,
    nproc: ProcessesOption = None,
    name: NameOption = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Instead of train.steps.")] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the last good save in --name, or start anew."),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Train what a run.toml describes, and compare with what was predicted.

    Starts the processes itself; under torchrun, Slurm or Kubernetes it joins those that are there.
    Saves as it goes, starts again where processes fail, and goes on from the last good save.

    Exits with 1 if it failed, 3 if it would fail again (loss is NaN, ranks have unequal data, no
    save is good), 128 + signal if it was asked to stop.
    """
    from shardwise.spec.record import SpecError
    from shardwise.spec.run import read_run

    described = read_run(run)
    if resume and name is None:
        raise SpecError("--resume: which run? Give its --name")
    if resume and described.train is not None and not described.train.checkpoint.save:
        raise SpecError("--resume: train.checkpoint is false, so there is nothing to go on from")
    if steps:
        described = with_steps(described, steps)
    arguments = ["train", str(run), *(["--steps", str(steps)] if steps else [])]
    result = launch_or_join(described, run, arguments, nproc, name, as_json, resume)
    if as_json and result is not None:
        print_json(result_json(result))


def with_steps(described: RunSpec, steps: int, **changes: object) -> RunSpec:
    """The same run with so many steps, and other settings of `[train]` changed."""
    from shardwise.spec.train import TrainSettings

    settings = described.train or TrainSettings()
    warmup = min(settings.warmup_steps, steps)
    return described._replace(train=settings.but(steps=steps, warmup_steps=warmup, **changes))


def as_probe(described: RunSpec, steps: int) -> RunSpec:
    """The same run for so many steps, of which only the time is of interest."""
    return with_steps(
        described,
        steps,
        trackers=(),
        log_every=steps,
        profile=None,
        checkpoint=False,
        restart={"attempts": 0},
    )


def launch_or_join(
    described: RunSpec,
    file: Path,
    arguments: list[str],
    nproc: int | None,
    name: str | None,
    as_json: bool,
    resume: bool = False,
) -> Result | None:
    """Train, as one of the processes there are; returns how it ended, on rank 0 only.

    Where nobody has started processes, this one starts some, each with `arguments`, and exits when
    they have ended.
    """
    from shardwise.cli.long import long_command, needs_torch

    needs_torch()
    long_command()
    from shardwise.spec.train import TrainSettings
    from shardwise.train import launch
    from shardwise.train.slurm import adopt_slurm

    joined = adopt_slurm(os.environ) or launch.is_worker(os.environ)
    processes = 1 if joined else processes_for(described, nproc)
    if not joined and (processes > 1 or launch.machines() > 1):
        folder = _folder(described, file, name, resume)
        os.environ[launch.FOLDER] = str(folder)
        arguments = [*arguments, *(["--json"] if as_json else [])]
        settings = (described.train or TrainSettings()).restart
        raise typer.Exit(launch.launch(arguments, processes, folder, settings))
    return _work(described, file, name, as_json, joined, resume)


def _work(
    described: RunSpec, file: Path, name: str | None, as_json: bool, joined: bool, resume: bool
) -> Result | None:
    """Be one of the processes."""
    from shardwise.cli.long import speak_for_all
    from shardwise.report.train import TrainScreen
    from shardwise.train import launch
    from shardwise.train.run import run_training

    leads = os.environ.get("RANK", "0") == "0"
    launched = joined and launch.FOLDER in os.environ
    if launched:
        launch.end_with_launcher()
    folder = Path(os.environ.get(launch.FOLDER, "."))
    if leads and not launched:
        folder = _folder(described, file, name, resume)
    screen = TrainScreen()
    with speak_for_all(on_error=screen.close, launched=launched):
        result = run_training(described, folder, None if as_json else screen)
    if result.stopped_by is not None and not launched:
        # As the shell says it of a process that a signal has ended; schedulers know it.
        raise typer.Exit(128 + result.stopped_by)
    return result if leads else None


def result_json(result: Result) -> dict[str, object]:
    """What `--json` prints of a run that has ended."""
    return {
        "reason": result.reason,
        "steps": result.steps,
        "folder": str(result.folder),
        "last": dict(result.last),
        "predicted": result.predicted.to_dict(),
        **({"measured": result.measured.to_dict()} if result.measured else {}),
    }


def _folder(described: RunSpec, file: Path, name: str | None, resume: bool = False) -> Path:
    from shardwise.checkpoint.format.run_folder import place_in
    from shardwise.spec.record import SpecError
    from shardwise.spec.train import TrainSettings
    from shardwise.train import launch
    from shardwise.train.folder import default_name, make_folder

    parent = Path((described.train or TrainSettings()).folder)
    if launch.machines() > 1:
        # Every machine finds the same one, in every attempt.
        folder = parent / (name or f"{file.stem}-{os.environ.get('PET_RDZV_ID', 'run')}")
        folder.mkdir(parents=True, exist_ok=True)
        to = (described.train or TrainSettings()).checkpoint.to
        if not resume and place_in(folder, to).steps():
            raise SpecError(f"--name: {folder} holds a run; add --resume, or name another")
        return folder
    if resume and name is not None and (parent / name).is_dir():
        return parent / name
    return make_folder(parent, name or default_name(file))


def processes_for(described: RunSpec, nproc: int | None) -> int:
    """How many processes to start here."""
    import torch

    from shardwise.spec.record import SpecError
    from shardwise.spec.train import TrainSettings
    from shardwise.train.start import device_kind

    device = device_kind(described, described.train or TrainSettings())
    cuda = torch.cuda.is_available() and device != "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise SpecError('train.device: torch sees no CUDA device here; use "auto" or "cpu"')
    if nproc is None:
        if not cuda and not described.cluster.device.is_cpu:
            raise SpecError(
                f"cluster: names {described.cluster.device.name} but torch sees no GPU here; add "
                "--nproc 2 to run it on two CPU processes"
            )
        return described.cluster.devices_per_node
    if cuda and nproc > torch.cuda.device_count():
        raise SpecError(
            f"--nproc: {nproc} processes, but {torch.cuda.device_count()} GPUs are here"
        )
    return nproc
