"""Shared by long-running commands: torch, signals, tracebacks, and errors of several ranks."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shardwise.spec.foreign_text import echo, echo_traceback, one_line
from shardwise.spec.record import SpecError

DEBUG = "SHARDWISE_DEBUG"


def wants_traceback() -> bool:
    """Whether `--debug` was given or SHARDWISE_DEBUG is set."""
    return os.environ.get(DEBUG) not in (None, "", "0")


def prepare_long_run() -> None:
    """Prepare for a long run: enable garbage collection, show log lines, ignore SIGPIPE.

    With SIGPIPE ignored, a lost peer raises an error instead of ending the process.
    """
    from shardwise.launch.say import show_log_lines

    gc.enable()
    show_log_lines()
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def needs_torch() -> None:
    """Raise a SpecError with the install command if torch is not installed."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise SpecError(
            "this command needs torch; install it with 'pip install shardwise[hf]'"
        ) from None


@contextmanager
def report_errors_once(
    on_error: Callable[[], None] = lambda: None, launched: bool = False
) -> Iterator[None]:
    """Report known errors once for all ranks, then end the process with their exit code.

    Rank 0 reports. Other ranks wait two seconds first, so they report only if rank 0 is silent.
    With `launched`, the launcher reports lost peers. `on_error` runs first, to close the screen.
    """
    from shardwise.checkpoint.dcp.load import NoIntactCheckpointError, UnreachableError
    from shardwise.checkpoint.dcp.save import SaveError
    from shardwise.engine.replicas import HealingError
    from shardwise.launch.supervisor import PEER_LOST
    from shardwise.pytorch.device import PeerFailedError, is_lost_peer
    from shardwise.trainer.agree import UnequalDataError
    from shardwise.trainer.loop import NonFiniteError

    # A restart would repeat a lasting error; it may not meet a passing one again.
    lasting, passing = (
        (UnequalDataError, NonFiniteError, NoIntactCheckpointError),
        (SaveError, UnreachableError, HealingError),
    )
    try:
        yield
    except (SpecError, *lasting, *passing) as error:
        on_error()
        cause = error.__cause__
        if launched and isinstance(cause, RuntimeError) and is_lost_peer(cause):
            os._exit(PEER_LOST)  # a save that failed because a rank was lost
        if os.environ.get("RANK", "0") != "0":
            time.sleep(2)
        if wants_traceback():
            echo_traceback(error)
        problems = error.problems if isinstance(error, SpecError) else [str(error)]
        for problem in problems:
            echo(f"error: {one_line(problem)}", err=True)
        sys.stderr.flush()
        # Leave at once: peers may be waiting in a collective that will never complete.
        os._exit(2 if isinstance(error, SpecError) else 3 if isinstance(error, lasting) else 1)
    except RuntimeError as error:
        if not is_lost_peer(error):
            raise
        on_error()
        # The launcher reports which rank is lost.
        if launched:
            if isinstance(error, PeerFailedError) and os.environ.get("LOCAL_RANK") == "0":
                echo(f"error: {one_line(str(error))}", err=True)
            os._exit(PEER_LOST)
        raise
