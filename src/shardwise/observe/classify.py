"""What a device row is: compute, communication or a copy, by the best evidence there is.

Collective metadata decides first, then the name; a stranger on a stream of collectives is told. On
a CPU every instant of a thread belongs to the innermost event.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shardwise.observe.innermost import innermost
from shardwise.observe.trace import Codes, Ints, Trace
from shardwise.spec.lookup import read_toml
from shardwise.spec.record import SpecError, did_you_mean
from shardwise.timeline.spans import KINDS, Timeline

# The second names are those of the first Kineto versions.
COPY_CATEGORIES = ("gpu_memcpy", "gpu_memset", "Memcpy", "Memset")
DEVICE_CATEGORIES = ("kernel", "Kernel", *COPY_CATEGORIES)
RUNTIME_CATEGORIES = ("cuda_runtime", "cuda_driver", "hip_runtime", "Runtime")
OPERATION_CATEGORIES = ("cpu_op", "Operator")
_COMMUNICATION = re.compile(
    r"nccl|rccl|msccl|nvshmem|"
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|sendrecv|cross_device_reduce",
    re.IGNORECASE,
)
# Operations around a collective; what happens in them is copying, not compute.
_COPIES = re.compile(r"^(fsdp::|c10d::|_c10d_functional::)")
_GLOO = re.compile(r"^(gloo|mpi|ucc):")


class Rules(NamedTuple):
    """Names a user knows better: regular expressions that come before all evidence."""

    compute: tuple[str, ...] = ()
    communication: tuple[str, ...] = ()
    copy: tuple[str, ...] = ()


def on_device(trace: Trace) -> npt.NDArray[np.bool_]:
    """Rows of a device; rows of the host may carry a stream too, and are not."""
    return trace.in_category(*DEVICE_CATEGORIES)


def read_rules(path: Path) -> Rules:
    """Rules of a TOML file: lists of regular expressions under compute, communication and copy."""
    table = read_toml(path, "rules")
    problems = []
    for name, patterns in table.items():
        if name not in Rules._fields:
            hint = did_you_mean(name, Rules._fields) or f"; known are {', '.join(Rules._fields)}"
            problems.append(f"rules.{name}: unknown kind{hint}")
        elif not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
            problems.append(f"rules.{name}: must be a list of texts")
        else:
            problems += [f"rules.{name}: {p!r} is no regular expression" for p in patterns
                         if not _compiles(p)]  # fmt: skip
    if problems:
        raise SpecError(problems)
    return Rules(**{name: tuple(patterns) for name, patterns in table.items()})


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True


def unrecognised(trace: Trace, timeline: Timeline) -> list[str]:
    """Names of kernels that count as compute but run on a stream of collectives.

    They may be collectives under a name nobody knows; rules decide.
    """
    moving = timeline.of_kind("communication")
    computing = timeline.of_kind("compute")
    mostly = [
        lane
        for lane in np.unique(timeline.lane[moving]).tolist()
        if (moving & (timeline.lane == lane)).sum() > (computing & (timeline.lane == lane)).sum()
    ]
    odd = computing & np.isin(timeline.lane, mostly)
    return [trace.texts[code] for code in np.unique(timeline.name[odd]).tolist()]


def device_timeline(trace: Trace, rules: Rules | None = None) -> Timeline:
    """Everything a device did, a lane per stream."""
    rows = np.flatnonzero(on_device(trace))
    kinds = _kinds(trace, rows, rules or Rules())
    lanes, lane = np.unique(
        np.stack([trace.device[rows], trace.stream[rows]], axis=1), axis=0, return_inverse=True
    )
    return Timeline(
        lane=lane.reshape(-1).astype(np.int32),
        start_ns=trace.start_ns[rows],
        end_ns=trace.end_ns[rows],
        kind=kinds,
        name=trace.name[rows],
        unit=np.full(len(rows), -1, dtype=np.int32),
        bytes=np.maximum(trace.moved[rows], 0),
        lanes=[f"device {device} stream {stream}" for device, stream in lanes.tolist()],
        names=trace.texts,
        units=[],
    )


def _kinds(trace: Trace, rows: Ints, rules: Rules) -> npt.NDArray[np.int8]:
    compute, communication, copy = (KINDS.index(k) for k in ("compute", "communication", "copy"))
    kinds = np.full(len(rows), compute, dtype=np.int8)
    copies = np.isin(trace.category[rows], [trace.code(c) for c in COPY_CATEGORIES])
    kinds[copies] = copy
    described = np.isin(rows, trace.collective_row)
    kernels = ~copies
    kinds[kernels & described] = communication
    kinds[kernels & _named(trace, trace.name[rows], _COMMUNICATION)] = communication
    for kind, patterns in ((compute, rules.compute), (communication, rules.communication),
                           (copy, rules.copy)):  # fmt: skip
        for pattern in patterns:
            kinds[_named(trace, trace.name[rows], re.compile(pattern))] = kind
    return kinds


def _named(trace: Trace, names: Codes, pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
    """Rows whose name matches; each text is looked at once."""
    matches = np.zeros(len(trace.texts) + 1, dtype=np.bool_)
    for code in np.unique(names[names >= 0]).tolist():
        matches[code] = pattern.search(trace.texts[code]) is not None
    found: npt.NDArray[np.bool_] = matches[names]
    return found


def host_timeline(trace: Trace) -> Timeline:
    """Everything the threads of a process did on a CPU: each instant to the innermost event."""
    rows = np.flatnonzero(trace.in_category(*OPERATION_CATEGORIES, "user_annotation"))
    claims = np.full(len(rows), -1, dtype=np.int8)
    claims[_named(trace, trace.name[rows], _COPIES)] = KINDS.index("copy")
    claims[_named(trace, trace.name[rows], _GLOO)] = KINDS.index("communication")
    pieces = innermost(
        trace.start_ns[rows], trace.end_ns[rows], trace.process[rows], trace.thread[rows], claims
    )
    row = rows[pieces.owner]
    names = trace.name[row]
    operations = trace.in_category(*OPERATION_CATEGORIES)[row]
    kinds = np.where(operations, KINDS.index("compute"), -1).astype(np.int8)
    kinds = np.where(pieces.claim >= 0, pieces.claim, kinds)
    # An annotation is nobody's work: what happens in it and is no operation is waiting.
    kept = kinds >= 0
    threads = sorted(set(pieces.thread[kept].tolist()))
    return Timeline(
        lane=np.searchsorted(threads, pieces.thread[kept]).astype(np.int32),
        start_ns=pieces.start[kept],
        end_ns=pieces.end[kept],
        kind=kinds[kept],
        name=names[kept],
        unit=np.full(int(kept.sum()), -1, dtype=np.int32),
        bytes=np.zeros(int(kept.sum()), dtype=np.int64),
        lanes=[f"thread {number}" for number in threads],
        names=trace.texts,
        units=[],
    )
