"""`shardwise accept`: check on real devices what Shardwise promises."""

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
    from shardwise.accept.checks import Checked
    from shardwise.accept.machine import Machine
    from shardwise.accept.result import Result
    from shardwise.report.accept import AcceptProgress

# Of one check: a machine that is ten times slower than a quiet one still passes.
DEADLINE_S = 600.0
# Characters of the temporary folder: a socket inside it takes 50 of the 107 that it can have.
MAX_PATH = 57
# Where compilers keep what they compile, instead of in the home of the user.
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
    from shardwise.cli.long import long_command, needs_torch

    if _is_task():
        return
    names = _names(only, skip)
    check_output(output, ".json")
    needs_torch()
    long_command()
    from shardwise.accept.machine import this_machine
    from shardwise.report.accept import AcceptProgress, print_result
    from shardwise.spec.catalogue import find_device

    machine = this_machine(nproc, find_device(device) if device else None)
    progress = AcceptProgress(len(names), quiet=as_json)
    result, stopped_by = _run(names, machine, deadline, progress)
    from shardwise.accept.result import write_result

    write_result(output, result)
    if as_json:
        print_json(result.to_dict())
    else:
        print_result(result, output)
    if stopped_by:
        raise typer.Exit(128 + stopped_by)
    if not result.passed:
        raise typer.Exit(1)


def _is_task() -> bool:
    """Whether a check has started this process; if so, do its work."""
    from shardwise.cli.long import long_command, speak_for_all

    # Known without an import of torch.
    task = os.environ.get("SHARDWISE_ACCEPT_TASK")
    if task is None:
        return False
    long_command()
    from shardwise.accept.ranks import work
    from shardwise.train.launch import FOLDER, end_with_launcher

    if "RANK" in os.environ and FOLDER in os.environ:
        end_with_launcher()
    with speak_for_all():
        code = work(Path(task))
    if code:
        raise typer.Exit(code)
    return True


def _names(only: str | None, skip: str | None) -> list[str]:
    """The checks to run, in the order of all."""
    from shardwise.accept.checks import CHECKS
    from shardwise.spec.record import Problems, SpecError, did_you_mean

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
    """A signal asks to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def _stop(number: int, _: Any) -> None:
    raise _StoppedError(number)


def _short_folder() -> str | None:
    """Where to make the folder: as usual, unless sockets in it would have too long a path."""
    usual = tempfile.gettempdir()
    return None if len(usual) <= MAX_PATH or not os.path.isdir("/tmp") else "/tmp"


def _run(
    names: list[str], machine: Machine, deadline_s: float, progress: AcceptProgress
) -> tuple[Result, int]:
    """Run the checks in a folder that disappears; return the signal that stopped them, or 0."""
    from shardwise.accept.bench import Bench
    from shardwise.accept.checks import run_checks
    from shardwise.accept.result import Result, with_missing

    begin, number = time.monotonic(), 0
    done: list[Checked] = []
    previous = {one: signal.signal(one, _stop) for one in (signal.SIGINT, signal.SIGTERM)}
    with tempfile.TemporaryDirectory(prefix="accept-", dir=_short_folder()) as folder:
        # What killed processes leave behind disappears with the folder.
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
    checked = with_missing(done, names, reason)
    seconds = time.monotonic() - begin
    found = Result(
        machine, checked, bench.trained_runs, bench.calibrated_cluster, seconds, stopped_by=word
    )
    return found, number
