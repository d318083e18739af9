"""Ranks in three levels of groups: save, load, and lose one of them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.checkpoint.dcp.load import load_last
from shardwise.checkpoint.dcp.save import Saver
from shardwise.checkpoint.format.manifest import Manifest
from shardwise.checkpoint.format.pieces import Tensor
from shardwise.checkpoint.format.storage import find_storage
from shardwise.engine import rank_tree
from shardwise.engine.rank_tree import RankTree, shared_tree
from shardwise.pytorch.device import is_lost_peer
from tests.distributed.layout_run import said_by

ROWS = 100
# Before the step at which a rank dies, all agree.
LAST_STEP = 5
# Sums in a row: a rank that waits where it should not does so now and then.
ROUNDS = 100


def weight() -> torch.Tensor:
    return torch.arange(ROWS * 3, dtype=torch.float32).reshape(ROWS, 3)


def divided() -> dict[str, torch.Tensor]:
    """The rows of this rank, and a tensor that all have."""
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh, full = DeviceMesh("cpu", torch.arange(size)), weight()
    parts = full.chunk(size)
    local = parts[rank].clone() if rank < len(parts) else full[:0].clone()
    sharded = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride()
    )
    return {"weight": sharded, "plain": torch.arange(7)}


@contextmanager
def limit(one_group: int) -> Iterator[None]:
    """Up to how many ranks are in one group, while the body creates groups."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_tree, "ONE_GROUP", one_group)
        yield


def save(case: dict[str, Any]) -> str:
    """Save a step; what is said if it fails, as it does on the rank `fails`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with limit(case["one_group"]):
        saver = Saver(find_storage(case["place"]), 0, case["background"])
    own = {f"rank.{rank}.mark": torch.tensor([rank])}
    state = divided()
    if rank == case.get("fails"):
        state["plain"] = "no tensor"  # type: ignore[assignment]
    about = Manifest(step=case["step"], world=size, sequences=0, run={}, versions={})
    return said_by(saver, state, own, about)


def load(case: dict[str, Any]) -> bool:
    """Whether what is loaded, as shards of this many ranks, is what was saved."""
    rank, room = dist.get_rank(), divided()
    local = room["weight"].to_local()  # type: ignore[attr-defined]
    local.zero_()
    room["plain"].zero_()
    mark = {f"rank.{rank}.mark": torch.zeros(1, dtype=torch.int64)} if case["marked"] else {}

    def into(_: Manifest, saved: Mapping[str, Tensor]) -> dict[str, torch.Tensor]:
        return {**room, **mark}

    with limit(case["one_group"]):
        loaded = load_last(find_storage(case["place"]), into)
    assert loaded is not None
    assert loaded.skipped == []
    expected = divided()
    return (
        torch.equal(local, expected["weight"].to_local())  # type: ignore[attr-defined]
        and torch.equal(room["plain"], expected["plain"])
        and all(int(tensor) == rank for tensor in mark.values())
    )


def start_first(case: dict[str, Any]) -> int:
    """Start sums before the last rank does, which begins when all others went on; the last sum."""
    rank, size = dist.get_rank(), dist.get_world_size()
    tree = RankTree(separate=True, one_group=1)
    values = torch.zeros(1, dtype=torch.int64)
    for number in range(ROUNDS):
        values = torch.tensor([number])
        gone_on = [Path(case["folder"], f"{number}-{other}") for other in range(size - 1)]
        if rank == size - 1:
            while not all(path.exists() for path in gone_on):
                time.sleep(0.001)
        wait = tree.start_all_reduce(values)
        if rank < size - 1:
            gone_on[rank].touch()
        wait()
    return int(values)


def hear(case: dict[str, Any]) -> list[Any]:
    """Values of one rank, as this one receives them."""
    with limit(case["one_group"]):
        tree = shared_tree()
    own = tree.rank == case["speaker"]
    return [tree.json_of(case["speaker"], value if own else None) for value in case["values"]]


def lose_a_rank(rank: int, size: int, victim: int, folder: str) -> None:
    """Agree on a few steps; one rank then dies while the others agree. Each writes how it ended."""
    store = dist.FileStore(f"{folder}/store", size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    tree = shared_tree(one_group=1)
    for step in range(LAST_STEP):
        values = torch.tensor([step])
        tree.start_all_reduce(values)()
        assert int(values) == step * size
    if rank == victim:
        # The others are waiting by then, each in one of the levels.
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        tree.start_all_reduce(torch.tensor([LAST_STEP]))()
        told = "agreed without the victim"
    except RuntimeError as error:
        told = "lost a peer" if is_lost_peer(error) else str(error)
    Path(folder, f"rank-{rank}").write_text(told)
    # As a process that failed ends: others learn of it from their connections.
    os._exit(1)
