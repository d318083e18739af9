"""Cost of joining ranks, by ranks and by calls per rank, from synthetic calls without files."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from benchmarks.page import rows
from benchmarks.scale.cost import Case, Measured, Part, exponent, memory_mb, reset_peak, size, timed

if TYPE_CHECKING:
    from shardwise.observe.rank.calls import Calls

CALLS = 500
RANKS = (8, 64, 512, 4096)


def synthetic(rank: int, ranks: int, calls: int) -> Calls:
    """Calls alternating between all ranks and the eight of a node; rank 3 is late by 5 µs."""
    import numpy as np

    from shardwise.observe.rank.calls import Calls

    node = rank // 8
    # Profilers truncate long lists of ranks. Each call has its own string, as after reading.
    listed = ", ".join(map(str, range(min(ranks, 30))))
    keys = [
        f"0 [{listed}, ...]" if number % 2 == 0 else f"{node + 1} [{node * 8}, ..., {node * 8 + 7}]"
        for number in range(calls)
    ]
    begin = np.arange(calls, dtype=np.int64) * 100_000 + (5_000 if rank == 3 else 0)
    unknown = np.full(calls, -1, dtype=np.int64)
    return Calls(
        operation=["all-gather"] * calls,
        start_ns=begin + 1_000_000 * rank,
        # Each rank has its own clock.
        end_ns=np.arange(calls, dtype=np.int64) * 100_000 + 50_000 + 1_000_000 * rank,
        issued_ns=unknown,
        issued_thread=unknown.astype(np.int32),
        moved_bytes=unknown,
        group_size=unknown,
        sent=unknown,
        received=unknown,
        key=keys,
    )


def measure(ranks: int, calls: int) -> dict[str, float]:
    from shardwise.observe.ranks import join_collectives

    each = [synthetic(rank, ranks, calls) for rank in range(ranks)]
    before = reset_peak()
    start = time.process_time()
    joined = join_collectives(each)
    last = joined.last_to_arrive()
    transfer = joined.transfer_ns
    took = time.process_time() - start
    return {
        "join_s": took,
        "calls": ranks * calls,
        "collectives": joined.collectives,
        "transfer_ns": transfer,
        "late": int(last[3]),
        "late_others": int(last.sum() - last[3]),
        "grown_mb": memory_mb("VmHWM") - before,
        "held_mb": before,
    }


def table(found: list[Measured]) -> str:
    text = rows(
        ["ranks", "calls per rank", "calls in total", "join", "peak process memory"],
        [
            [
                *(f"{one.case['ranks']:,}", f"{one.case['calls']:,}", f"{one['calls']:,.0f}"),
                *(timed(one, "join_s"), size(one["peak_mb"] * 2**20)),
            ]
            for one in found
        ],
    )
    large = [one for one in found if one["calls"] >= 64 * CALLS]
    p = exponent([one["calls"] for one in large], [one["join_s"] for one in large])
    return text + f"\nTime grows as the total number of calls to the power {p:.2f}.\n"


def _cases(ranks: tuple[int, ...], more: tuple[int, ...]) -> list[Case]:
    wide: list[Case] = [{"ranks": n, "calls": CALLS} for n in ranks]
    return wide + [{"ranks": 64, "calls": n} for n in more]


PART = Part(
    "Joining ranks", _cases(RANKS, (5_000, 50_000)), _cases((64, 512), (5_000,)), measure, table
)
