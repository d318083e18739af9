"""What commands that run for more than a moment share."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer

from shardwise.spec.record import SpecError


def long_command() -> None:
    """Undo what makes short commands start fast."""
    gc.enable()
    if hasattr(signal, "SIGPIPE"):
        # A peer that goes away is an error to be told, not the end of the process.
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)


def needs_torch() -> None:
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError:
        raise SpecError(
            "this command needs torch; install it with 'pip install shardwise[hf]'"
        ) from None


@contextmanager
def speak_for_all(on_error: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Tell what went wrong once: rank 0 first, the others only if it had nothing to say."""
    from shardwise.train.agree import UnequalDataError
    from shardwise.train.loop import NonFiniteError

    try:
        yield
    except (SpecError, UnequalDataError, NonFiniteError) as error:
        on_error()
        if os.environ.get("RANK", "0") != "0":
            time.sleep(2)
        problems = error.problems if isinstance(error, SpecError) else [str(error)]
        for problem in problems:
            typer.echo(f"error: {problem}", err=True)
        sys.stderr.flush()
        # Leave at once: peers may be waiting in a collective that will never complete.
        os._exit(2 if isinstance(error, SpecError) else 1)
