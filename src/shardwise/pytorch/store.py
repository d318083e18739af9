"""A store of torch.distributed that listens on one address only."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import TCPStore


def listen(address: str, backlog: int = 1024) -> socket.socket:
    """A socket that listens on one address, at a free port."""
    listener = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
    listener.bind((address, 0))
    listener.listen(backlog)
    return listener


def new_store(listen_on: str) -> TCPStore:
    """A TCPStore in this process that listens on one address, at a free port."""
    listener = listen(listen_on)
    return TCPStore(
        listen_on or "127.0.0.1",
        listener.getsockname()[1],
        is_master=True,
        timeout=timedelta(minutes=30),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )
