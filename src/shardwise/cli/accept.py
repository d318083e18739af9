"""`shardwise doctor` without a run, once `shardwise accept`: check the devices of this machine."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwise.cli.output import JsonOption, check_output, print_json

if TYPE_CHECKING:
    from shardwise.report.accept import AcceptProgress
    from shardwise.trials.accept.checks import CompletedCheck
    from shardwise.trials.accept.machine import Machine
    from shardwise.trials.accept.result import Result

# Seconds for one check: a machine ten times slower than an idle one still passes.
DEADLINE_S = 600.0
# Most characters of the temporary folder's path: a socket path has at most 107, and 50 of them
# come after the folder.
MAX_PATH = 57
# Variables for the caches of compilers, to keep them out of the user's home.
_CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def accept(
    nproc: Annotated[
        int | None,
        typer.Option(
            "--nproc", min=1, help="Devices to use; default: all GPUs, or two CPU processes."
        ),
    ] = None,
    only: Annotated[
        str | None,
        typer.Option(help="Checks to run, separated by commas; default: all.", show_default=False),
    ] = None,
    skip: Annotated[
        str | None,
        typer.Option(help="Checks to leave out, separated by commas.", show_default=False),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="Device of the catalogue; default: the one that torch's name means."),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="JSON file to write the results to.")
    ] = Path("accept.json"),
    deadline: Annotated[
        float, typer.Option(min=1, help="Seconds after which a check is stopped and has failed.")
    ] = DEADLINE_S,
    as_json: JsonOption = False,
) -> None:
    """Check on this machine's devices what Shardwise promises, in about ten minutes.

    Checks: parity (every strategy against one unsharded device, in fp64), collectives (calls and
    bytes), memory (allocated and reserved), time (before and after calibrate), overlap (in a
    trace), overhead (against a hand-written loop), resume (save, kill, resume to the bit) and
    compile. What a machine cannot show is "not run", with the reason.

    Ctrl-C stops it; what was seen so far is printed and written. Exits with 1 if a check failed or
    nothing could be shown, 128 + signal if a signal stopped it.
    """
    check_machine(nproc, only, skip, device, output, deadline, as_json=as_json)


def check_machine(
    nproc: int | None,
    only: str | None,
    skip: str | None,
    device: str | None,
    output: Path,
    deadline: float,
    *,
    as_json: bool,
) -> None:
    """Run the checks on this machine's devices; print the results and write them to `output`.

    In a process that a check started, do the work of that check instead. Exit with 1 if a check
    failed, 128 + signal if a signal stopped it. `deadline` is in seconds per check.
    """
    from shardwise.cli.long import needs_torch, prepare_long_run

    if _ran_as_task():
        return
    names = _selected_checks(only, skip)
    check_output(output, ".json")
    needs_torch()
    prepare_long_run()
    from shardwise.report.accept import AcceptProgress, print_result
    from shardwise.spec.catalogue import find_device
    from shardwise.trials.accept.machine import this_machine

    machine = this_machine(nproc, find_device(device) if device else None)
    progress = AcceptProgress(len(names), quiet=as_json)
    result, stopped_by = _run(names, machine, deadline, progress)
    from shardwise.trials.accept.result import write_result

    write_result(output, result)
    if as_json:
        print_json(result.to_dict())
    else:
        print_result(result, output)
    if stopped_by:
        raise typer.Exit(128 + stopped_by)
    if not result.passed:
        raise typer.Exit(1)


def _ran_as_task() -> bool:
    """Whether a check has started this process; if so, its work has been done on return."""
    from shardwise.cli.long import prepare_long_run, report_errors_once

    # Read before torch is imported.
    task = os.environ.get("SHARDWISE_ACCEPT_TASK")
    if task is None:
        return False
    prepare_long_run()
    from shardwise.launch.environment import FOLDER, end_with_launcher
    from shardwise.trials.accept.ranks import work

    if "RANK" in os.environ and FOLDER in os.environ:
        end_with_launcher()
    with report_errors_once():
        code = work(Path(task))
    if code:
        raise typer.Exit(code)
    return True


def _selected_checks(only: str | None, skip: str | None) -> list[str]:
    """Names of the checks to run, in their standard order; SpecError for an unknown name."""
    from shardwise.spec.record import Problems, SpecError, did_you_mean
    from shardwise.trials.accept.checks import CHECKS

    known = tuple(CHECKS)
    problems = Problems()
    asked: dict[str, set[str]] = {}
    for option, text in (("--only", only), ("--skip", skip)):
        asked[option] = {word.strip() for word in (text or "").split(",") if word.strip()}
        if text is not None and not asked[option]:
            problems.found.append(f"{option}: names no check; known are {', '.join(known)}")
        for word in sorted(asked[option] - {*known}):
            with problems.collect():
                hint = did_you_mean(word, known) or f"; known are {', '.join(known)}"
                raise SpecError(f"{option}: unknown check {word[:60]!r}{hint}")
    problems.raise_if_any()
    chosen = asked["--only"] or {*known}
    names = [name for name in known if name in chosen - asked["--skip"]]
    if not names:
        raise SpecError("--skip: leaves no check to run")
    return names


class _StoppedError(BaseException):
    """Raised when a signal asks to stop; `number` is the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _stop(number: int, _: Any) -> None:
    """Signal handler that raises _StoppedError."""
    raise _StoppedError(number)


def _short_folder() -> str | None:
    """The parent of the temporary folder: /tmp if the default path is too long for sockets.

    None stands for the default.
    """
    usual = tempfile.gettempdir()
    return None if len(usual) <= MAX_PATH or not os.path.isdir("/tmp") else "/tmp"


def _run(
    names: list[str], machine: Machine, deadline_s: float, progress: AcceptProgress
) -> tuple[Result, int]:
    """Run the checks in a temporary folder; return the result, and the stopping signal or 0."""
    from shardwise.trials.accept.bench import Bench
    from shardwise.trials.accept.checks import run_checks
    from shardwise.trials.accept.result import Result, with_missing_checks

    begin, number = time.monotonic(), 0
    done: list[CompletedCheck] = []
    previous = {one: signal.signal(one, _stop) for one in (signal.SIGINT, signal.SIGTERM)}
    with tempfile.TemporaryDirectory(prefix="accept-", dir=_short_folder()) as folder:
        # Files of killed processes are deleted with the folder.
        os.environ["TMPDIR"] = folder
        os.environ.update({name: str(Path(folder, name.lower())) for name in _CACHES})
        bench = Bench(machine, Path(folder), progress.step)
        try:
            run_checks(names, bench, deadline_s, done, progress)
        except _StoppedError as stopped:
            number = stopped.number
        for one, handler in previous.items():
            signal.signal(one, handler)
    word = signal.Signals(number).name if number else ""
    reason = f"stopped by {word}" if word else "gave no line"
    checked = with_missing_checks(done, names, reason)
    seconds = time.monotonic() - begin
    found = Result(
        machine, checked, bench.trained_runs, bench.calibrated_cluster, seconds, stopped_by=word
    )
    return found, number
