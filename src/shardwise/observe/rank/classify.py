"""Classify events as compute, communication or copy.

Collective metadata decides first, then the process group's annotation on the stream, then the
kernel name; unknown kernels on a stream of collectives are reported. On a CPU every instant of a
thread belongs to the innermost event.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from shardwise.observe.file.trace import Bools, Codes, Ints, Trace
from shardwise.observe.rank.flatten_nested import flatten_nested
from shardwise.observe.rules import Rules
from shardwise.step.intervals import contains, union
from shardwise.step.spans import KINDS, Timeline

# The capitalised names are those of the first Kineto versions.
COPY_CATEGORIES = ("gpu_memcpy", "gpu_memset", "Memcpy", "Memset")
DEVICE_CATEGORIES = ("kernel", "Kernel", *COPY_CATEGORIES)
RUNTIME_CATEGORIES = ("cuda_runtime", "cuda_driver", "hip_runtime", "Runtime")
OPERATION_CATEGORIES = ("cpu_op", "Operator")
_COMMUNICATION = re.compile(
    r"nccl|rccl|msccl|nvshmem|"
    r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|sendrecv|cross_device_reduce",
    re.IGNORECASE,
)
# Operations around a collective: what runs inside them is copying, not compute.
_COPIES = re.compile(r"^(fsdp::|c10d::|_c10d_functional::)")
_GLOO = re.compile(r"^(gloo|mpi|ucc):")
# Annotation that a process group writes on the stream around its kernels.
_GROUP_ANNOTATION = re.compile(r"^(nccl|rccl|ucc|xccl):")


def on_device(trace: Trace) -> npt.NDArray[np.bool_]:
    """Boolean per row: whether it ran on a device; a `stream` field alone is not enough."""
    return trace.in_category(*DEVICE_CATEGORIES)


def unrecognised_kernels(trace: Trace, timeline: Timeline) -> list[str]:
    """Names of kernels that count as compute but run on a stream of collectives.

    They may be collectives with an unknown name; `--rules` can classify them.
    """
    moving = timeline.of_kind("communication")
    computing = timeline.of_kind("compute")
    mostly = [
        lane
        for lane in np.unique(timeline.lane[moving]).tolist()
        if (moving & (timeline.lane == lane)).sum() > (computing & (timeline.lane == lane)).sum()
    ]
    suspicious = computing & np.isin(timeline.lane, mostly)
    return [trace.texts[code] for code in np.unique(timeline.name[suspicious]).tolist()]


def device_timeline(trace: Trace, rules: Rules | None = None) -> Timeline:
    """Timeline of a device, a lane per stream."""
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
    """Kind of each device row, as an index into KINDS; `rules` override all other evidence."""
    compute, communication, copy = (KINDS.index(k) for k in ("compute", "communication", "copy"))
    kinds = np.full(len(rows), compute, dtype=np.int8)
    copies = np.isin(trace.category[rows], [trace.code(c) for c in COPY_CATEGORIES])
    kinds[copies] = copy
    with_metadata = np.isin(rows, trace.collective_row)
    kernels = ~copies
    kinds[kernels & with_metadata] = communication
    kinds[kernels & _in_group_annotation(trace, rows)] = communication
    kinds[kernels & names_matching(trace, trace.name[rows], _COMMUNICATION)] = communication
    for kind, patterns in ((compute, rules.compute), (communication, rules.communication),
                           (copy, rules.copy_)):  # fmt: skip
        for pattern in patterns:
            kinds[names_matching(trace, trace.name[rows], re.compile(pattern))] = kind
    return kinds


def _in_group_annotation(trace: Trace, rows: Ints) -> npt.NDArray[np.bool_]:
    """Boolean per device row: whether it lies inside a process group's annotation on its stream."""
    found = np.zeros(len(rows), dtype=np.bool_)
    notes = np.flatnonzero(
        trace.in_category("gpu_user_annotation")
        & names_matching(trace, trace.name, _GROUP_ANNOTATION)
    )
    for thread in np.unique(trace.thread[notes]).tolist():
        here = notes[trace.thread[notes] == thread]
        inside = union(trace.start_ns[here], trace.end_ns[here])
        mine = trace.thread[rows] == thread
        mine &= np.isin(trace.process[rows], trace.process[here])
        # An annotation spans from the start of its first kernel to the end of its last.
        last = np.maximum(trace.start_ns[rows], trace.end_ns[rows] - 1)
        found |= mine & contains(inside, trace.start_ns[rows]) & contains(inside, last)
    return found


def names_matching(trace: Trace, names: Codes, pattern: re.Pattern[str]) -> npt.NDArray[np.bool_]:
    """Boolean per name: whether it matches `pattern`; every distinct text is searched once."""
    matches = np.zeros(len(trace.texts) + 1, dtype=np.bool_)
    for code in np.unique(names[names >= 0]).tolist():
        matches[code] = pattern.search(trace.texts[code]) is not None
    found: npt.NDArray[np.bool_] = matches[names]
    return found


def host_timeline(trace: Trace) -> Timeline:
    """Timeline of the threads of a CPU process; each instant belongs to the innermost event."""
    rows = np.flatnonzero(trace.in_category(*OPERATION_CATEGORIES, "user_annotation"))
    inherited = np.full(len(rows), -1, dtype=np.int8)
    inherited[names_matching(trace, trace.name[rows], _COPIES)] = KINDS.index("copy")
    inherited[names_matching(trace, trace.name[rows], _GLOO)] = KINDS.index("communication")
    pieces = flatten_nested(
        trace.start_ns[rows], trace.end_ns[rows], trace.process[rows], trace.thread[rows], inherited
    )
    row = rows[pieces.owner]
    names = trace.name[row]
    operations = trace.in_category(*OPERATION_CATEGORIES)[row]
    kinds = np.where(operations, KINDS.index("compute"), -1).astype(np.int8)
    kinds = np.where(pieces.kind >= 0, pieces.kind, kinds)
    # Time directly inside an annotation, outside any operation, is waiting.
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
    """The memory fields of a `Timeline`: time and allocated bytes of the records in `mine`."""
    return {"memory_ns": trace.memory_ns[mine], "memory_bytes": trace.memory_bytes[mine]}
