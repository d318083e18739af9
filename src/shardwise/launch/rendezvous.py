"""How the processes of a run find each other: with a new store in every attempt.

A store that outlives an attempt still holds the addresses of its dead processes, and the processes
of the next attempt would wait for them.
"""

from __future__ import annotations

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from shardwise.pytorch.store import new_store


class LoopbackRendezvous(RendezvousHandler):
    """The rendezvous of one machine: a new store per attempt, on the loopback interface."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._store: TCPStore | None = None

    def get_backend(self) -> str:
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        self._store = new_store("127.0.0.1")
        at = RendezvousStoreInfo("127.0.0.1", self._store.port)
        return RendezvousInfo(self._store, 0, 1, at)

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to do: no other machine takes part."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """True: nothing is left to close."""
        return True
