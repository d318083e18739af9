"""`shardwise doctor`: check a run before training, on a few CPU processes."""

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
    from shardwise.train.check import Check

_RESULT = "SHARDWISE_DOCTOR_RESULT"


def doctor(
    run: Annotated[Path, typer.Argument(help="The run.toml.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Check a run before training: a reduced model on a few CPU processes.

    Checks memory, batch, data, sharding, tied weights, dtypes, collectives, and that loss and
    gradient norm equal those of one process. Exits with 1 if a check fails.
    """
    from shardwise.cli.long import long_command, needs_torch
    from shardwise.spec.run import read_run

    described = read_run(run)
    needs_torch()
    long_command()
    if _RESULT in os.environ:
        _work(described)
        return
    from shardwise.report.doctor import print_checks
    from shardwise.train.doctor import check_plan, processes_for

    checks = check_plan(described)
    processes = processes_for(described)
    checks += _run_checks(described, run, processes)
    failed = any(check.passed is False for check in checks)
    if as_json:
        print_json({"passed": not failed, "checks": [check._asdict() for check in checks]})
    else:
        print_checks(checks, processes)
    if failed:
        raise typer.Exit(1)


def _run_checks(described: RunSpec, file: Path, processes: int) -> list[Check]:
    from shardwise.engine.device import hide_accelerators
    from shardwise.train import launch
    from shardwise.train.check import Check

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "checks.json")
        os.environ[_RESULT] = str(result)
        # The checks run on CPUs, whatever device the run names.
        hide_accelerators()
        code = launch.launch(["doctor", str(file)], processes, Path(folder))
        del os.environ[_RESULT]
        if not result.exists():
            return [Check("reduced run", False, f"the processes failed with exit code {code}")]
        return [Check(**check) for check in json.loads(result.read_text())]


def _work(described: RunSpec) -> None:
    from shardwise.cli.long import speak_for_all
    from shardwise.train.check import Check
    from shardwise.train.doctor import check_running, miniature

    with speak_for_all():
        mini = miniature(described)
        if mini is None:
            checks = [Check("reduced run", None, "the module is too large to check on CPUs")]
        else:
            checks = check_running(described, mini)
    if os.environ.get("RANK", "0") == "0":
        Path(os.environ[_RESULT]).write_text(json.dumps([check._asdict() for check in checks]))
