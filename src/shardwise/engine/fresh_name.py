"""Agree on a new name through a store, even if the store holds values of earlier agreements.

torchft numbers the meetings of replica groups, and a lighthouse that restarts counts from 1 again.
Under a number that was used before, a store still has the addresses of closed sockets.
"""

from __future__ import annotations

import json
import time
import uuid
from datetime import timedelta
from typing import Any

_POLL_S = 0.01


def agree_on_name(store: Any, rank: int, size: int, timeout: timedelta) -> str:
    """A new name that all `size` ranks return.

    Each rank writes a new random token. The first rank proposes a name together with the tokens
    that it read, again whenever a token changes, until all ranks have accepted the same proposal. A
    rank accepts only a proposal with its own token, which no earlier meeting has.

    Raises:
        TimeoutError: A rank did not take part in time.
    """
    token, deadline = uuid.uuid4().hex, time.monotonic() + timeout.total_seconds()
    store.set(f"token/{rank}", token)
    proposed: dict[str, Any] = {"name": "", "tokens": []}
    while True:
        if rank == 0:
            tokens = [_read(store, f"token/{other}") for other in range(size)]
            if "" not in tokens and tokens != proposed["tokens"]:
                proposed = {"name": uuid.uuid4().hex, "tokens": tokens}
                store.set("proposal", json.dumps(proposed))
        else:
            proposed = json.loads(_read(store, "proposal") or json.dumps(proposed))
        name = proposed["name"]
        if len(proposed["tokens"]) == size and proposed["tokens"][rank] == token:
            store.set(f"accepted/{rank}", name)
            everyone = [_read(store, f"accepted/{other}") for other in range(size)]
            if rank == 0 and everyone == [name] * size:
                store.set("agreed", name)
            if _read(store, "agreed") == name:
                return str(name)
        if time.monotonic() > deadline:
            raise TimeoutError("a replica group did not come to the meeting")
        time.sleep(_POLL_S)


def _read(store: Any, key: str) -> str:
    """The value of a key in the store; empty if it has none."""
    return store.get(key).decode() if store.check([key]) else ""
