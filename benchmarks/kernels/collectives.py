"""Collectives inside a node: a share of the link, and time per call and per hop.

NCCL sends small messages by a protocol of low latency and large ones by one of high bandwidth, and
takes the faster: so does the form. On NVSwitch an all-reduce of a whole node adds up in the switch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.kernels.fitting import Numbers, Prior, Values
from benchmarks.kernels.study import Key, Problem, Result, Skipped, grouped, solve, too_few
from benchmarks.kernels.tables import Row, read
from shardwise.spec.kernels import collective_s, wire_bytes

# Below, only a call's latency counts.
BYTES = 64 * 2**10
NAMES = {
    "all_gather": "all-gather",
    "all_reduce": "all-reduce",
    "reduce_scatter": "reduce-scatter",
    "alltoall": "all-to-all",
}
# One direction, bytes/s: of the catalogue, and of devices it does not have.
LINKS = {
    "A100-80GB": 300e9,
    "H100-SXM": 450e9,
    "H200-SXM": 450e9,
    "B200": 900e9,
    "B300": 900e9,
    "GB200": 900e9,
    "GB300": 900e9,
    "L40S": 32e9,
    "RTX-PRO-6000-Server": 64e9,
}
ADDING_SWITCHES = ("H100-SXM", "H200-SXM", "B200", "B300", "GB200", "GB300")
# Ranks of a node from which on NCCL lets the switch add up.
SWITCH_FROM = 5


def studies() -> Iterator[Result]:
    """Every collective and device of the table, inside one node."""
    for key, rows in grouped(read("collectives"), _key).items():
        moved = np.asarray([row.number("bytes") for row in rows])
        reason = too_few(moved)
        if reason:
            yield Skipped(key, len(rows), reason)
            continue
        yield solve(key, _problem(key, rows, moved))


def _problem(key: Key, rows: Sequence[Row], moved: Numbers) -> Problem:
    ranks = np.asarray([row.number("ranks") for row in rows])
    groups = sorted({int(n) for n in ranks})
    link = LINKS[key.device]
    in_switch = "switch" in key.kernel or "multimem" in key.kernel
    constants: dict[str, Any] = {"ranks": groups, **({"in_switch": True} if in_switch else {})}
    wire = wire_bytes(key.kernel, moved, ranks, in_switch=in_switch)
    priors = {
        "share": Prior(0.75, 0.5, high=1.0),
        "setup_s": Prior(2e-5, 1.0),
        "small_share": Prior(0.3, 0.7, high=1.0),
        "call_s": Prior(8e-6, 1.0),
    }
    # Of one size of group, hops and peers are in the other coefficients; a switch has no peers.
    if len(groups) > 1:
        priors["hop_s"] = Prior(1e-6, 1.0)
    else:
        constants["hop_s"] = 0.0
    if len(groups) > 1 and not in_switch:
        priors["half_peers"] = Prior(0.3, 0.7)
    else:
        constants["half_peers"] = 0.0

    def form(v: Values) -> Numbers:
        found: Numbers = collective_s(
            wire,
            ranks,
            link,
            v["share"],
            v.get("half_peers", 0.0),
            v["setup_s"],
            v["small_share"],
            v["call_s"],
            v.get("hop_s", 0.0),
        )
        return found

    seconds = np.asarray([row.number("time_us") for row in rows]) * 1e-6
    return Problem(rows, seconds, form, priors, moved, link, constants, levels=ranks)


def _key(row: Row) -> Key | None:
    cells = row.cells
    if cells["nodes"] != "1" or not cells["time_us"] or row.number("bytes") < BYTES:
        return None
    ranks = row.number("ranks")
    # Without peer-to-peer between all cards they go through the host, at 2 to 6 GB/s.
    if row.device == "L40S" and ranks > 2:
        return None
    name = NAMES[cells["op"]]
    library = cells["library"].removeprefix("torch ")
    if not library.startswith("NCCL"):
        name = f"{name}, {library}"
    elif name == "all-reduce" and row.device in ADDING_SWITCHES:
        ring = cells["algo"].startswith("Ring")
        if ranks >= SWITCH_FROM and not ring:
            name = "all-reduce in the switch"
    return Key(row.device, "collective", name, "any")
