"""Dispatch and combine of tokens by libraries for expert parallelism: DeepEP.

A token goes once to each rank that has one of its experts, and once to each other node that has
one. Rows that print a bandwidth count copies that stay on the rank or node too. Kernels of low
latency serve inference and are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.kernels.collectives import LINKS
from benchmarks.kernels.fitting import Numbers, Prior, Values
from benchmarks.kernels.study import Key, Problem, Result, Skipped, grouped, solve, too_few
from benchmarks.kernels.tables import Row, read
from shardwise.spec.kernels import dispatch_s, distinct_groups

# 400 Gb/s of each rank, which all rows between nodes have or are assumed to have.
NETWORK = 50e9
# The same link and network: which of the two machines ran is not stated.
DEVICES = {"H200/H100": "H100-SXM", "H100/H800": "H100-SXM"}
# DeepEP's own test routes a token to experts on so many nodes at most; serving engines to any.
NODES_OF_A_TOKEN = 4
# Scales of 128 values in fp32.
BYTES = {"bf16": 2.0, "fp8": 1.0 + 4.0 / 128.0}
PRIORS = {
    "share": Prior(0.7, 0.5, high=1.0),
    "call_s": Prior(5e-5, 1.0),
}
PER_TOKEN = Prior(2e-8, 1.0)


def studies() -> Iterator[Result]:
    """Every library, direction and device of the table, inside one node and between nodes."""
    rows = [row for row in read("alltoall") if row.cells["mode"] in ("normal", "V2")]
    for key, mine in grouped(rows, _key).items():
        moved = np.asarray([_moved(row) for row in mine])
        reason = too_few(moved)
        if reason:
            yield Skipped(key, len(mine), reason)
            continue
        yield solve(key, _problem(key, mine, moved))


def _problem(key: Key, rows: Sequence[Row], moved: Numbers) -> Problem:
    tokens = np.asarray([row.number("tokens_per_rank") for row in rows])
    ranks = sorted({int(row.number("ep")) for row in rows})
    between = _nodes(rows[0]) > 1
    rate = NETWORK if between else LINKS[key.device]
    constants: dict[str, Any] = {"ranks": ranks, **({"between_nodes": True} if between else {})}
    # A time per token shows only where tokens differ in bytes.
    widths = {row.cells["hidden"] for row in rows}
    priors = PRIORS | ({"token_s": PER_TOKEN} if len(widths) > 1 else {})

    def form(v: Values) -> Numbers:
        found: Numbers = dispatch_s(
            tokens, moved, rate, v["share"], v["call_s"], v.get("token_s", 0.0)
        )
        return found

    seconds = np.asarray([_seconds(row) for row in rows])
    return Problem(rows, seconds, form, priors, moved, rate, constants)


def _key(row: Row) -> Key | None:
    cells = row.cells
    if not cells["hidden"] or not (cells["time_us"] or cells["gbs"]):
        return None
    between = _nodes(row) > 1
    # The H800's links are slower than those of the device it otherwise equals.
    if cells["device"] == "H800" and not between:
        return None
    device = DEVICES.get(row.device, row.device)
    if device not in LINKS:
        return None
    library = cells["library"] + (" V2" if cells["mode"] == "V2" else "")
    name = f"{library}, {cells['direction']}{' between nodes' if between else ''}"
    return Key(device, "dispatch", name, _dtype(row))


def _dtype(row: Row) -> str:
    """The dtype on the wire; fp8 is only for dispatch."""
    return row.cells["dtype"].removesuffix(" assumed") or "bf16"


def _nodes(row: Row) -> int:
    return int(row.number("nodes"))


def _groups(row: Row) -> float:
    """Mean number of ranks, or of nodes, that a token goes to, its own among them."""
    experts, chosen = int(row.number("experts") or 256), int(row.number("topk"))
    nodes = _nodes(row)
    if nodes == 1:
        return float(distinct_groups(experts, chosen, int(row.number("ep"))))
    limited = nodes if row.cells["time_us"] else min(nodes, NODES_OF_A_TOKEN)
    return float(distinct_groups(experts * limited // nodes, chosen, limited))


def _logical(row: Row) -> float:
    """Bytes of all copies of a rank's tokens, those that stay on the rank or node too."""
    width = row.number("hidden") * BYTES[_dtype(row)]
    return row.number("tokens_per_rank") * width * _groups(row)


def _moved(row: Row) -> float:
    """Bytes that the link or the network is asked to carry."""
    nodes = _nodes(row)
    return _logical(row) * ((nodes - 1) / nodes if nodes > 1 else 1.0)


def _seconds(row: Row) -> float:
    printed = row.number("time_us")
    return printed * 1e-6 if printed else _logical(row) / (row.number("gbs") * 1e9)
