"""`shardwise doctor`: check a run before training, on a few CPU processes, or this machine."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwise.cli.output import JsonOption, print_json

if TYPE_CHECKING:
    from shardwise.spec.run import RunSpec
    from shardwise.trials.doctor.check import Check

_RESULT = "SHARDWISE_DOCTOR_RESULT"


_Run = Annotated[
    Path | None,
    typer.Argument(
        help="The run.toml; without one, this machine's devices are checked.",
        show_default=False,
    ),
]
_Nproc = Annotated[
    int | None,
    typer.Option("--nproc", min=1, help="Devices to use; default: all GPUs, or two CPU processes."),
]
_Sharding = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        help="Your code that shards a mixture of experts: a function of the module that returns it "
        "sharded, or with a function of the gradient norm.",
    ),
]
_Only = Annotated[
    str | None, typer.Option(help="Checks of devices, separated by commas; default: all.")
]
_Skip = Annotated[
    str | None, typer.Option(help="Checks of devices to leave out, separated by commas.")
]
_Device = Annotated[
    str | None,
    typer.Option(help="Device of the catalogue; default: the one that torch's name means."),
]
_Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="JSON file for the results of devices; default: accept.json."
    ),
]
_Deadline = Annotated[
    float | None,
    typer.Option(
        min=1,
        help="Seconds until a check of devices has failed; default: 600.",
    ),
]


def doctor(
    run: _Run = None,
    sharding: _Sharding = None,
    nproc: _Nproc = None,
    only: _Only = None,
    skip: _Skip = None,
    device: _Device = None,
    output: _Output = None,
    deadline: _Deadline = None,
    as_json: JsonOption = False,
) -> None:
    """Check a run before training, or this machine's devices.

    With a run: a reduced model on a few CPU processes. Checks memory, batch, data, sharding, tied
    weights, dtypes, collectives, and that loss and gradient norm equal those of one process.

    With a run and --sharding: gradients of a mixture of experts that your own code shards, on four
    CPU processes, against one process: experts divided twice or not reduced across replicas, norms
    that leave some out, frozen routers, adapters that miss experts.

    Without: what Shardwise promises, on the devices, in about ten minutes. Checks: parity (every
    strategy against one unsharded device, in fp64), collectives (calls and bytes), memory
    (allocated and reserved), time (before and after calibrate), overlap (in a trace), overhead
    (against a hand-written loop), resume (save, kill, resume to the bit) and compile. What a
    machine cannot show is "not run", with the reason. Ctrl-C stops it and keeps what was seen.

    Exits with 1 if a check failed or no device could be checked, 128 + signal if a signal stopped
    it.
    """
    if run is None:
        if sharding is not None:
            raise _misplaced("sharding", "a run; give its run.toml")
        from shardwise.cli.accept import DEADLINE_S, check_machine

        file = output or Path("accept.json")
        limit = DEADLINE_S if deadline is None else deadline
        check_machine(nproc, only, skip, device, file, limit, as_json=as_json)
        return
    options = {"nproc": nproc, "only": only, "skip": skip, "device": device, "output": output,
               "deadline": deadline}  # fmt: skip
    _refuse_device_options([name for name, value in options.items() if value is not None])
    _check_run(run, sharding, as_json=as_json)


def _refuse_device_options(given: list[str]) -> None:
    """Raise SpecError if options for checks of devices are given with a run."""
    if given:
        raise _misplaced(given[0], "the check of this machine's devices; leave it out, or the run")


def _misplaced(option: str, place: str) -> Exception:
    """The error for an option that is for another kind of check."""
    from shardwise.spec.record import SpecError

    return SpecError(f"--{option}: is for {place}")


def _check_run(run: Path, sharding: str | None, *, as_json: bool) -> None:
    """Check a run and print the result; exit with 1 if a check failed.

    In a process that this check launched, do the work of one rank instead.
    """
    from shardwise.cli.long import needs_torch, prepare_long_run
    from shardwise.spec.run import read_run

    described = read_run(run)
    needs_torch()
    prepare_long_run()
    if _RESULT in os.environ:
        _work(described, sharding)
        return
    from shardwise.report.doctor import print_checks
    from shardwise.trials.doctor.expert_checks import PROCESSES
    from shardwise.trials.doctor.plan_checks import check_plan
    from shardwise.trials.doctor.run import processes_for

    if sharding is None:
        checks, processes = check_plan(described), processes_for(described)
        checks += _run_checks([str(run)], processes)
    else:
        processes = PROCESSES
        checks = _run_checks([str(run), "--sharding", sharding], processes)
    failed = any(check.passed is False for check in checks)
    if as_json:
        print_json({"passed": not failed, "checks": [check._asdict() for check in checks]})
    else:
        print_checks(checks, processes)
    if failed:
        raise typer.Exit(1)


def _run_checks(words: list[str], processes: int) -> list[Check]:
    """Run `doctor` with these words on CPU processes; return the checks that rank 0 wrote.

    Without these, return one failed check with the exit code.
    """
    from shardwise.launch import launcher as launch
    from shardwise.pytorch.device import hide_accelerators
    from shardwise.trials.doctor.check import Check

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "checks.json")
        os.environ[_RESULT] = str(result)
        # The checks run on CPUs, whatever device the run names.
        hide_accelerators()
        code = launch.launch(["doctor", *words], processes, Path(folder))
        del os.environ[_RESULT]
        if not result.exists():
            return [Check("reduced run", False, f"the processes failed with exit code {code}")]
        return [Check(**check) for check in json.loads(result.read_text())]


def _work(described: RunSpec, sharding: str | None) -> None:
    """Do the checks of one rank; rank 0 writes them to the result file."""
    from shardwise.cli.long import report_errors_once
    from shardwise.trials.doctor.check import Check
    from shardwise.trials.doctor.run import check_running, check_sharding, miniature

    with report_errors_once():
        mini = miniature(described) if sharding is None else None
        if sharding is not None:
            checks = check_sharding(described, sharding)
        elif mini is None:
            checks = [Check("reduced run", None, "the module is too large to check on CPUs")]
        else:
            checks = check_running(described, mini)
    if os.environ.get("RANK", "0") == "0":
        Path(os.environ[_RESULT]).write_text(json.dumps([check._asdict() for check in checks]))
