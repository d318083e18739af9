"""Launch the processes of a training, or join processes that a launcher has started."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from shardwise.cli.output import print_json
from shardwise.spec.foreign_text import echo
from shardwise.spec.progress import stages

if TYPE_CHECKING:
    from shardwise.spec.run import RunSpec
    from shardwise.trainer.run import Result


def with_steps(described: RunSpec, steps: int, **changes: object) -> RunSpec:
    """The run with `steps` steps and `changes` to its `[train]` settings."""
    from shardwise.spec.train import TrainSettings

    settings = described.train or TrainSettings()
    warmup = min(settings.warmup_steps, steps)
    return described._replace(
        train=settings.but(steps=steps, epochs=None, warmup_steps=warmup, **changes)
    )


def as_short_run(described: RunSpec, steps: int) -> RunSpec:
    """The run with only `steps` steps, without trackers, evaluation, checkpoints and restarts.

    It serves to measure the step time.
    """
    return with_steps(
        described._replace(eval=None),
        steps,
        trackers=(),
        metrics=None,
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
    """Train as one of the launched processes; return the result on rank 0, None elsewhere.

    Without a launcher, and for several processes or hosts, this process launches others with
    `arguments` and exits with their code. `nproc` is the number of processes on this machine.
    """
    from shardwise.cli.long import needs_torch, prepare_long_run
    from shardwise.launch import environment
    from shardwise.launch import launcher as launch
    from shardwise.launch.shared_secret import take_secret
    from shardwise.launch.slurm import adopt_slurm
    from shardwise.spec.lookup import ModuleRef
    from shardwise.spec.train import TrainSettings
    from shardwise.trainer.admit import check_can_train
    from shardwise.trainer.folder import check_name

    if name is not None:
        check_name(name)
    elif environment.host_range().most > 1:
        check_name(_name_on_all_hosts(file))
    secret = take_secret(os.environ)  # before any code of the user runs
    joined = adopt_slurm(os.environ) or environment.is_worker(os.environ)
    cluster = described.cluster
    per_node = nproc or (cluster.devices_per_node if cluster.device.is_cpu else None)
    if not joined and per_node:
        # Before torch is imported, which takes seconds.
        hosts = environment.host_range()
        if not hosts.is_elastic:
            check_can_train(described, per_node * hosts.most, per_node)
    if not as_json:
        stages.show()
    if "torch" not in sys.modules:  # a rank may be forked from a process that has imported it
        stages.begin("Importing torch")
    from_transformers = not isinstance(described.model, ModuleRef)
    here, hosts_most = per_node or cluster.devices_per_node, environment.host_range().most
    if not joined and (here > 1 or hosts_most > 1):
        launch.import_early(here, transformers=from_transformers)
    needs_torch()
    prepare_long_run()
    processes = 1 if joined else processes_for(described, nproc)
    if not joined and (processes > 1 or hosts_most > 1):
        folder = _folder(described, file, name, resume)
        os.environ[environment.FOLDER] = str(folder)
        os.environ[environment.RESUME_COMMAND] = _resume_command(arguments, nproc, folder)
        arguments = [*arguments, *(["--json"] if as_json else [])]
        settings = (described.train or TrainSettings()).restart
        sizes = _sizes(described, processes)
        packages = "torch and transformers" if from_transformers else "torch"
        stages.begin(f"Starting {processes} processes, which import {packages}")
        raise typer.Exit(
            launch.launch(
                *(arguments, processes, folder, settings, sizes),
                transformers=from_transformers,
                secret=secret,
                is_done=_completion_check(folder, described),
            )
        )
    leads = os.environ.get("RANK", "0") == "0"
    launched = joined and environment.FOLDER in os.environ
    folder = Path(os.environ.get(environment.FOLDER, "."))
    if leads and not launched:
        folder = _folder(described, file, name, resume)
        os.environ[environment.RESUME_COMMAND] = _resume_command(arguments, nproc, folder)
    return _train_as_worker(described, folder, as_json, launched)


def _completion_check(folder: Path, described: RunSpec) -> Callable[[], bool]:
    """A function that says whether the run in `folder` ended normally: all steps or all data.

    It says no if the record of the run cannot be read.
    """
    from shardwise.launch.best_effort import BestEffort
    from shardwise.runs.record import NAME, is_done
    from shardwise.spec.train import TrainSettings

    file = folder / NAME
    steps = (described.train or TrainSettings()).steps
    reading = BestEffort(f"read {file}", lambda why: echo(f"shardwise: {why}", err=True))

    def check() -> bool:
        with reading, suppress(FileNotFoundError):
            return is_done(file.read_bytes(), steps)
        return False

    return check


def _sizes(described: RunSpec, per_host: int) -> tuple[int, ...]:
    """The numbers of hosts that the run can use; with several, their costs are printed."""
    from shardwise.launch.environment import host_range
    from shardwise.trainer.sizes import sizes_of

    hosts = host_range()
    if not hosts.is_elastic:
        return (hosts.most,)
    sizes = sizes_of(described, per_host, hosts)
    for size in sizes:
        echo(f"shardwise: {size}", err=True)
    return tuple(size.hosts for size in sizes if not size.problem)


def _resume_command(arguments: list[str], nproc: int | None, folder: Path) -> str:
    """The command that resumes the run in `folder`."""
    processes = ["--nproc", str(nproc)] if nproc else []
    words = ["shardwise", *arguments, *processes, "--name", folder.name, "--resume"]
    return shlex.join(words)


def _train_as_worker(
    described: RunSpec, folder: Path, as_json: bool, launched: bool
) -> Result | None:
    """Train as one of the processes; return the result on rank 0, None on other ranks.

    `launched` says that this command's own launcher started the process.
    """
    from shardwise.cli.long import report_errors_once
    from shardwise.launch import environment
    from shardwise.launch.supervisor import RESIZED
    from shardwise.launch.watcher import watch_this_host
    from shardwise.report.train import TrainScreen
    from shardwise.spec.train import TrainSettings
    from shardwise.trainer.run import run_training

    leads = os.environ.get("RANK", "0") == "0"
    if launched:
        environment.end_with_launcher()
    else:
        watch_this_host((described.train or TrainSettings()).restart)
    screen = TrainScreen(os.environ.get(environment.RESUME_COMMAND, ""))
    with report_errors_once(on_error=screen.close, launched=launched):
        result = run_training(described, folder, None if as_json else screen)
    if result.reason == "resizing":
        raise typer.Exit(RESIZED)
    if result.stopped_by is not None and not launched:
        if as_json and leads:
            print_json(result_json(result))
        # The exit code that shells and schedulers expect of a process stopped by a signal.
        raise typer.Exit(128 + result.stopped_by)
    return result if leads else None


def result_json(result: Result) -> dict[str, object]:
    """The result of a run as `--json` prints it."""
    stopped_by, predicted = result.stopped_by, result.predicted
    return {
        "reason": result.reason,
        **({} if stopped_by is None else {"stopped_by": signal.Signals(stopped_by).name}),
        "steps": result.steps,
        "folder": str(result.folder),
        **({} if result.checkpoint is None else {"checkpoint": result.checkpoint}),
        **({} if result.best is None else {"best": result.best._asdict()}),
        "last": dict(result.last),
        **({"predicted": predicted.to_dict()} if predicted else {}),
        **({"measured": result.measured.to_dict()} if result.measured else {}),
    }


def _folder(described: RunSpec, file: Path, name: str | None, resume: bool = False) -> Path:
    """The folder of the run, created if it is new; with `resume`, the existing one.

    Without `resume`, a name that exists gets a number on one host. On several hosts and in replica
    groups, checkpoints under that name raise SpecError.
    """
    from shardwise.checkpoint.format.run_folder import storage_in
    from shardwise.launch import environment
    from shardwise.spec.record import SpecError
    from shardwise.spec.train import TrainSettings
    from shardwise.trainer.folder import check_name, default_name, make_folder
    from shardwise.trainer.replicas.group import replica_group

    parent = Path((described.train or TrainSettings()).folder)
    if (group := replica_group(described)) is not None:
        return _group_folder(described, parent, name, group.number, resume)
    if environment.host_range().most > 1:
        folder = parent / (name or check_name(_name_on_all_hosts(file)))
        folder.mkdir(parents=True, exist_ok=True)
        to = (described.train or TrainSettings()).checkpoint.to
        if not resume and storage_in(folder, to).steps():
            raise SpecError(f"--name: {folder} exists; add --resume, or use another name")
        return folder
    if resume and name is not None and (parent / name).is_dir():
        return parent / name
    return make_folder(parent, name or default_name(file))


def _name_on_all_hosts(file: Path) -> str:
    """The default name of the run folder, equal on every host and in every attempt."""
    return f"{file.stem}-{os.environ.get('PET_RDZV_ID', 'run')}"


def _group_folder(
    described: RunSpec, parent: Path, name: str | None, number: int, resume: bool
) -> Path:
    """The folder of replica group `number`, inside the folder of the run; created if new.

    SpecError without a name, or if the run has checkpoints and `resume` is false. Replica groups
    start and return at any time.
    """
    from shardwise.checkpoint.format.run_folder import storage_in
    from shardwise.spec.record import SpecError

    if name is None:
        raise SpecError("--name: replica groups share the folder of their run; give all one name")
    folder = parent / name
    own = folder / f"replica-{number}"
    to = described.train.checkpoint.to if described.train is not None else None
    if not resume and storage_in(folder, to).steps():
        raise SpecError(f"--name: {folder} exists; add --resume, or use another name")
    own.mkdir(parents=True, exist_ok=True)
    return own


def processes_for(described: RunSpec, nproc: int | None) -> int:
    """The number of processes to launch on this machine: `nproc`, or those of a node.

    SpecError if the machine lacks the devices.
    """
    from shardwise.pytorch.device import accelerator, accelerator_count
    from shardwise.spec.record import SpecError
    from shardwise.spec.train import TrainSettings
    from shardwise.trainer.admit import device_kind

    device = device_kind(described, described.train or TrainSettings())
    if device not in ("auto", "cpu", accelerator()):
        raise SpecError(f'train.device: torch finds no {device} device; use "auto" or "cpu"')
    gpus = accelerator_count() if device != "cpu" else 0
    if nproc is None:
        if not gpus and not described.cluster.device.is_cpu:
            raise SpecError(
                f"cluster: names {described.cluster.device.name}, but torch finds no GPU; add "
                "--nproc 2 to train on two CPU processes"
            )
        return described.cluster.devices_per_node
    if gpus and nproc > gpus:
        raise SpecError(f"--nproc: {nproc} processes, but this machine has {gpus} GPUs")
    return nproc
