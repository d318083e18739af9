"""The axis of the mesh that a collective belongs to, if a trace shows it.

Collectives inside the computation of a block, along the tensor, context and expert axes, are named
by their axis: "tensor all-gather". Collectives of FSDP and DDP have plain names.

On a GPU, torch writes the description of the process group, which names the axis of a device mesh.
On a CPU, tensor parallelism issues other operations than FSDP, and each process group of Gloo has
threads of its own: an all-reduce belongs to the axis whose other operations its thread executes.
All-to-alls of context and of experts differ in the shapes of what they send. Shardwise writes the
mesh of a run into its traces.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np

from shardwise.observe.file.trace import Ints, Trace
from shardwise.observe.rank.gloo import shape
from shardwise.spec.mesh import INNER_AXES

# The key under which a trace holds the mesh: for each axis the size of its groups and the stride.
MESH = "shardwise_mesh"
# Names that other stacks give these axes of a mesh.
_NAMES = {"tp": "tensor", "cp": "context", "ep": "expert"} | {
    str(one): str(one) for one in INNER_AXES
}
_DESCRIPTION = re.compile(r"\bmesh_(\w+)$")
# Rows of tokens by their width.
_DIMENSIONS_OF_TOKENS = 2
_AXIS_OF_OPERATION = {
    "c10d::allgather_into_tensor_coalesced_": "tensor",
    "c10d::reduce_scatter_tensor_coalesced_": "tensor",
    "c10d::_allgather_base_": "shard",
    "c10d::_reduce_scatter_base_": "shard",
}


def operation_along_axis(operation: str, axis: str) -> str:
    """Name of an operation along an axis: "tensor all-gather"; plain outside INNER_AXES."""
    return f"{axis} {operation}" if axis in INNER_AXES else operation


def axis_of_group(text: str) -> str:
    """The axis of INNER_AXES that a process group's description names (mesh_tp, mesh_cp, mesh_ep).

    Empty for every other description.
    """
    match = _DESCRIPTION.search(text)
    return _NAMES.get(match[1], "") if match else ""


def axes_on_cpu(trace: Trace, executed: Ints, issued: Ints | None) -> list[str]:
    """The axis of each call of Gloo; empty where unknown, and in traces without INNER_AXES.

    `executed` and `issued` are the rows of the calls and of the operations that issued them.
    """
    if issued is None:
        return [""] * len(executed)
    mesh = mesh_of(trace)
    known = [
        _axis_of_all_to_all(trace, row, mesh)
        if trace.texts[code] == "c10d::alltoall_base_"
        else _AXIS_OF_OPERATION.get(trace.texts[code], "")
        for row, code in zip(issued.tolist(), trace.name[issued].tolist(), strict=True)
    ]
    tensor = size_along(mesh, "tensor") > 1
    if not tensor and not set(known) & set(INNER_AXES):
        return [""] * len(executed)
    threads = trace.thread[executed].tolist()
    of_thread = {thread: axis for thread, axis in zip(threads, known, strict=True) if axis}
    if tensor:
        # Without sequence parallelism, tensor parallelism only issues functional all-reduces, which
        # FSDP and DDP never issue.
        for row, thread in zip(_reductions(trace, issued), threads, strict=True):
            if row:
                of_thread.setdefault(thread, "tensor")
    return [axis or of_thread.get(thread, "") for thread, axis in zip(threads, known, strict=True)]


def _axis_of_all_to_all(trace: Trace, row: int, mesh: dict[str, AxisGroups]) -> str:
    """The axis along which the all-to-all of a row exchanges; empty if two do, and no shapes tell.

    Experts get rows of tokens, and their numbers before. Attention gets heads, which have more
    dimensions.
    """
    if size_along(mesh, "expert") == 1:
        return "context"
    if size_along(mesh, "context") == 1:
        return "expert"
    dimensions = len(shape(trace, row))
    return "context" if dimensions > _DIMENSIONS_OF_TOKENS else "expert" if dimensions else ""


def _reductions(trace: Trace, issued: Ints) -> list[bool]:
    """Whether each issued operation runs inside a `_c10d_functional::all_reduce`."""
    outer = np.flatnonzero(trace.name == trace.code("_c10d_functional::all_reduce"))
    starts = np.sort(trace.start_ns[outer])
    ends = trace.end_ns[outer][np.argsort(trace.start_ns[outer], kind="stable")]
    last = np.searchsorted(starts, trace.start_ns[issued], side="right") - 1
    inner_ends = trace.end_ns[issued].tolist()
    return [
        at >= 0 and bool(ends[at] >= end) for at, end in zip(last.tolist(), inner_ends, strict=True)
    ]


class AxisGroups(NamedTuple):
    """The groups along an axis: ranks per group, and the distance of neighbouring ranks."""

    size: int
    stride: int

    def group_of(self, rank: int) -> int:
        """Number of the group of a rank: equal within a group, different for other groups."""
        return rank // (self.stride * self.size) * self.stride + rank % self.stride


def mesh_of(trace: Trace) -> dict[str, AxisGroups]:
    """The groups along each axis, if Shardwise wrote its mesh into the trace; else empty."""
    told = trace.about.get(MESH)
    if not isinstance(told, dict):
        return {}
    return {
        str(axis): AxisGroups(*along) for axis, along in told.items() if _is_size_and_stride(along)
    }


def size_along(mesh: dict[str, AxisGroups], axis: str) -> int:
    """Ranks of a group along an axis; 1 where the mesh has no such axis."""
    return mesh[axis].size if axis in mesh else 1


def _is_size_and_stride(told: object) -> bool:
    """Whether a value is a list of two positive numbers: size and stride."""
    numbers = isinstance(told, list) and [type(n) is int and 0 < n < 2**31 for n in told]
    return numbers == [True, True]


def groups_along_axes(trace: Trace, axes: list[str], sizes: Ints) -> dict[str, AxisGroups]:
    """Size and stride of the groups along each axis that occurs in `axes`.

    `sizes` has the group size of each call. Where the mesh is not recorded, tensor groups have
    stride 1, and groups of other axes have the size of a tensor group as their stride.
    """
    mesh = mesh_of(trace)
    known = {axis: int(sizes[[one == axis for one in axes]].max()) for axis in set(axes) if axis}
    tensor = known.get("tensor", 1)
    return {
        axis: mesh.get(axis, AxisGroups(size, 1 if axis == "tensor" else tensor))
        for axis, size in known.items()
    }
