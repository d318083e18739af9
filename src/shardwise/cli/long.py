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
def speak_for_all(
    on_error: Callable[[], None] = lambda: None, launched: bool = False
) -> Iterator[None]:
    """Tell what went wrong once: rank 0 first, the others only if it had nothing to say.

    `launched` by Shardwise itself, which tells who of the others is gone.
    """
    from shardwise.checkpoint.dcp.load import NothingGoodError, UnreachableError
    from shardwise.checkpoint.dcp.save import SaveError
    from shardwise.train.agree import UnequalDataError
    from shardwise.train.loop import NonFiniteError
    from shardwise.train.supervisor import LOST

    # What would happen again if the run were started again, and what may not.
    lasting, passing = (
        (UnequalDataError, NonFiniteError, NothingGoodError),
        (SaveError, UnreachableError),
    )
    try:
        yield
    except (SpecError, *lasting, *passing) as error:
        on_error()
        if os.environ.get("RANK", "0") != "0":
            time.sleep(2)
        problems = error.problems if isinstance(error, SpecError) else [str(error)]
        for problem in problems:
            typer.echo(f"error: {problem}", err=True)
        sys.stderr.flush()
        # Leave at once: peers may be waiting in a collective that will never complete.
        os._exit(2 if isinstance(error, SpecError) else 3 if isinstance(error, lasting) else 1)
    except RuntimeError as error:
        if not _lost_a_peer(error):
            raise
        on_error()
        # Whose end that was, the launcher tells.
        if launched:
            os._exit(LOST)
        raise


def _lost_a_peer(error: RuntimeError) -> bool:
    """Whether a collective failed because another process is gone; torch has no type for it."""
    said = str(error)
    return any(words in said for words in ("Connection closed by peer", "Connection reset by peer"))
