"""One rank of a session: it trains the jobs; rank 0 receives them and replies."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.tensor import debug

from shardwise.engine.mesh import leave
from shardwise.launch.environment import end_with_launcher
from shardwise.pytorch.build import build_module
from shardwise.spec.model import ModelSpec
from shardwise.spec.record import SpecError
from shardwise.spec.run import read_run
from shardwise.trainer.folder import write_json
from shardwise.trainer.run import run_training

IDLE = timedelta(days=1)


def main(place: str) -> None:
    end_with_launcher()
    _warm_up()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = _store()
    if rank == 0:
        lead(place, store, size)
    else:
        follow(store, rank, size)


def lead(place: str, store: Store, size: int) -> None:
    """Pass every job to the other ranks through the store, and reply when all have finished."""
    with socket.socket(socket.AF_UNIX) as connection, contextlib.ExitStack() as stack:
        connection.connect(place)
        lines = stack.enter_context(connection.makefile("r"))
        _wait_for_all(store, 0, size)
        connection.sendall(b'{"code": 0, "error": ""}\n')
        for number, line in enumerate(lines, 1):
            store.set(f"job/{number}", line)
            error = work(line, number, store, 0, size)
            _wait_for_all(store, number, size)
            reply = {"code": 2 if error else 0, "error": error}
            connection.sendall(json.dumps(reply).encode() + b"\n")


def follow(store: Store, rank: int, size: int) -> None:
    number = 0
    while True:
        store.set(f"done/{number}/{rank}", "")
        number += 1
        store.wait([f"job/{number}"], IDLE)
        work(store.get(f"job/{number}").decode(), number, store, rank, size)


def work(line: str, number: int, store: Store, rank: int, size: int) -> str:
    """Train one job; return the error of an invalid job, the same on all ranks.

    Any other error ends this process, and with it the session.
    """
    job = json.loads(line)
    folder = Path(job["folder"])
    # Each job has its own process group under its own store prefix, without leftovers. DTensor
    # remembers meshes of earlier jobs, whose groups are gone.
    debug._clear_sharding_prop_cache()
    dist.init_process_group(
        "gloo", store=PrefixStore(f"group/{number}", store), rank=rank, world_size=size
    )
    try:
        result = run_training(read_run(Path(job["run"])), folder)
    except SpecError as error:
        # Others may still be connecting.
        dist.barrier()
        leave()
        return "\n".join(error.problems)
    if rank == 0:
        write_json(folder / "steps.json", {"step_s": list(result.step_s)})
    return ""


def _warm_up() -> None:
    """Import what jobs need, and exclude it from garbage collection."""
    sizes = {"layers": 1, "hidden": 8, "heads": 1, "ffn": 8, "vocab": 8, "max_positions": 8}
    with torch.device("meta"):
        build_module(ModelSpec.read({"family": "llama", **sizes}))
    gc.collect()
    gc.freeze()


def _store() -> Store:
    """The launcher's store, which exists as long as the session."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return PrefixStore("lab", TCPStore(host, port, is_master=False, timeout=IDLE))


def _wait_for_all(store: Store, number: int, size: int) -> None:
    others: Iterator[str] = (f"done/{number}/{rank}" for rank in range(1, size))
    if keys := list(others):
        store.wait(keys, IDLE)


if __name__ == "__main__":
    main(sys.argv[1])
