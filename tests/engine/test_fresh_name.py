"""Agreeing on a name in a real store that earlier meetings have used."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

pytest.importorskip("torch")
from torch.distributed import HashStore, PrefixStore

from shardwise.engine.fresh_name import agree_on_name

PATIENCE = timedelta(seconds=30)


def meet(store: Any, size: int, *, late: float = 0.0) -> list[str]:
    """The names that ranks in threads agree on; the first rank may come late."""

    def come(rank: int) -> str:
        if rank == 0 and late:
            threading.Event().wait(late)
        return agree_on_name(store, rank, size, PATIENCE)

    with ThreadPoolExecutor(size) as ranks:
        return list(ranks.map(come, range(size)))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_ranks_return_the_same_name(size: int) -> None:
    assert len(set(meet(HashStore(), size))) == 1


@pytest.mark.parametrize("late", [0.0, 0.1])
@pytest.mark.parametrize(("before", "now"), [(3, 3), (3, 2), (2, 3)])
def test_what_an_earlier_meeting_left_is_never_used(before: int, now: int, late: float) -> None:
    store = PrefixStore("torchft/1/0", HashStore())
    [old] = set(meet(store, before))
    [new] = set(meet(store, now, late=late))
    assert new != old


def test_a_rank_that_does_not_come_is_not_waited_for_forever() -> None:
    store = HashStore()
    meet(store, 2)
    with pytest.raises(TimeoutError):
        agree_on_name(store, 0, 2, timedelta(seconds=0.2))
