"""The entry point that makes `torchrun --rdzv-backend shardwise` use the rendezvous of Shardwise.

Torch loads this file whenever it imports its own rendezvous, for any backend. So slow imports wait
until a run begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def torchrun_backend() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The function that creates a rendezvous from the options of torchrun."""
    return make_rendezvous


def make_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """The rendezvous that the options of torchrun describe.

    If they are invalid, prints why and ends the process with exit code 2.
    """
    from shardwise.launch.torchrun_rendezvous import rendezvous_from
    from shardwise.spec.foreign_text import echo
    from shardwise.spec.record import SpecError

    try:
        return rendezvous_from(parameters)
    except SpecError as error:
        for problem in error.problems:
            echo(f"error: {problem}", err=True)
        raise SystemExit(2) from None
