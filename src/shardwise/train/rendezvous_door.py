"""The entry point that makes `torchrun --rdzv-backend shardwise` use the rendezvous of Shardwise.

Torch loads this file whenever it imports its own rendezvous, for any backend. So all that takes
time to import waits until a run begins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters


def torchrun_backend() -> Callable[[RendezvousParameters], RendezvousHandler]:
    """The function that makes a rendezvous from the options of torchrun."""
    return make_rendezvous


def make_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """A rendezvous as the options of torchrun say; invalid ones end the process with a sentence."""
    from shardwise.spec.foreign_text import echo
    from shardwise.spec.record import SpecError
    from shardwise.train.rendezvous_torchrun import rendezvous_from

    try:
        return rendezvous_from(parameters)
    except SpecError as error:
        for problem in error.problems:
            echo(f"error: {problem}", err=True)
        raise SystemExit(2) from None
