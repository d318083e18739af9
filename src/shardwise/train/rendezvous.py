"""How the processes of a run find each other: with a new store in every attempt.

A store that outlives an attempt still holds the addresses of its dead processes, and the processes
of the next attempt would wait for them.
"""

from __future__ import annotations

import os
import socket
import uuid
from datetime import timedelta

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler


def find_rendezvous(nodes: int) -> RendezvousHandler:
    """The rendezvous of one machine, or of the machines that torchrun's variables name."""
    run_id = os.environ.get("PET_RDZV_ID", uuid.uuid4().hex)
    if nodes == 1:
        return LoopbackRendezvous(run_id)
    # With this setting torch creates a new store in every round instead of sharing one.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    return get_rendezvous_handler(
        RendezvousParameters(
            backend=os.environ.get("PET_RDZV_BACKEND", "c10d"),
            endpoint=os.environ.get("PET_RDZV_ENDPOINT", "127.0.0.1:29400"),
            run_id=run_id,
            min_nodes=nodes,
            max_nodes=nodes,
        )
    )


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
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1024)
        port = listener.getsockname()[1]
        self._store = TCPStore(
            "127.0.0.1",
            port,
            is_master=True,
            timeout=timedelta(minutes=30),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo("127.0.0.1", port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing to do: no other machine takes part."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True
