"""What a device row is: compute, communication or a copy, by the best evidence there is.

Collective metadata decides first, then the process group's annotation on the stream, then the name;
a stranger on a stream of collectives is told. On a CPU every instant of a thread belongs to the
innermost event.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from shardwise.observe.file.trace import Bools, Codes, Ints, Trace
from shardwise.observe.rank.innermost import innermost
from shardwise.observe.rules import Rules
from shardwise.timeline.intervals import holds, union
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
# What a process group writes on the stream around its kernels.
_GROUP_NOTE = re.compile(r"^(nccl|rccl|ucc|xccl):")


def on_device(trace: Trace) -> npt.NDArray[np.bool_]:
    """Rows of a device; rows of the host may carry a stream too, and are not."""
    return trace.in_category(*DEVICE_CATEGORIES)


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
        **_memory(trace, trace.memory_of > 0),
    )


def _kinds(trace: Trace, rows: Ints, rules: Rules) -> npt.NDArray[np.int8]:
    compute, communication, copy = (KINDS.index(k) for k in ("compute", "communication", "copy"))
    kinds = np.full(len(rows), compute, dtype=np.int8)
    copies = np.isin(trace.category[rows], [trace.code(c) for c in COPY_CATEGORIES])
    kinds[copies] = copy
    described = np.isin(rows, trace.collective_row)
    kernels = ~copies
    kinds[kernels & described] = communication
    kinds[kernels & _annotated(trace, rows)] = communication
    kinds[kernels & named(trace, trace.name[rows], _COMMUNICATION)] = communication
    for kind, patterns in ((compute, rules.compute), (communication, rules.communication),
                           (copy, rules.copy_)):  # fmt: skip
        for pattern in patterns:
            kinds[named(trace, trace.name[rows], re.compile(pattern))] = kind
    return kinds


def _annotated(trace: Trace, rows: Ints) -> npt.NDArray[np.bool_]:
    """Device rows that lie inside an annotation of a process group, on the same stream."""
    found = np.zeros(len(rows), dtype=np.bool_)
    notes = np.flatnonzero(
        trace.in_category("gpu_user_annotation") & named(trace, trace.name, _GROUP_NOTE)
    )
    for thread in np.unique(trace.thread[notes]).tolist():
        here = notes[trace.thread[notes] == thread]
        inside = union(trace.start_ns[here], trace.end_ns[here])
        mine = trace.thread[rows] == thread
        mine &= np.isin(trace.process[rows], trace.process[here])
        # An annotation spans from its first kernel to its last.
        last = np.maximum(trace.start_ns[rows], trace.end_ns[rows] - 1)
        found |= mine & holds(inside, trace.start_ns[rows]) & holds(inside, last)
    return found


def named(trace: Trace, names: Codes, pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
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
    claims[named(trace, trace.name[rows], _COPIES)] = KINDS.index("copy")
    claims[named(trace, trace.name[rows], _GLOO)] = KINDS.index("communication")
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
        **_memory(trace, trace.memory_of == 0),
    )


def _memory(trace: Trace, mine: Bools) -> dict[str, Ints]:
    """The allocator's counter of a device, or of the process on a CPU."""
    return {"memory_ns": trace.memory_ns[mine], "memory_bytes": trace.memory_bytes[mine]}
