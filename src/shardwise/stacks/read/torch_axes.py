"""Read tensor and context parallelism from a script that uses torch's own."""

from __future__ import annotations

from shardwise.spec.mesh import Axis
from shardwise.stacks.read.imported import Reading
from shardwise.stacks.read.source import Call, Script

# Usual names of mesh axes.
_NAMES: dict[str, Axis] = {
    **dict.fromkeys(("replicate", "dp_replicate", "ddp"), "replicate"),
    **dict.fromkeys(("shard", "dp_shard", "fsdp", "dp", "data", "data_parallel"), "shard"),
    **dict.fromkeys(("context", "cp", "context_parallel"), "context"),
    **dict.fromkeys(("tensor", "tp", "tensor_parallel"), "tensor"),
}
# Variable names that hold a degree if the mesh does not give it.
_TENSOR = ("TENSOR", "TP", "TP_SIZE", "tp_size", "tp_degree", "tensor_parallel_size")
_CONTEXT = ("CONTEXT", "CP", "CP_SIZE", "cp_size", "cp_degree", "context_parallel_size")
# In scripts that `shardwise export` wrote.
_SHARD, _REPLICATE = ("SHARD",), ("REPLICATE",)


def read_axes(script: Script, reading: Reading) -> bool:
    """Read the degrees of all axes; return whether they were read.

    Without tensor or context parallelism in the script nothing is read, and the result is False.
    """
    divides, ring = script.uses("parallelize_module"), script.uses("context_parallel")
    ulysses = script.uses("all_to_all_single", "all_to_all") and bool(script.number(*_CONTEXT))
    if not divides and not ring and not ulysses:
        return False
    sizes = _mesh(script)
    for axis, names in (("tensor", _TENSOR), ("context", _CONTEXT), ("shard", _SHARD),
                        ("replicate", _REPLICATE)):  # fmt: skip
        found = script.number(*names)
        # A constant in capitals overrides the mesh, whose shard axis may include context.
        if found and found[1] > 0 and (axis not in sizes or found[0].isupper()):
            sizes[axis] = found[1]
    if divides:
        _tensor(script, sizes.get("tensor"), reading)
    if ring or ulysses:
        _context("ring" if ring else "ulysses", sizes.get("context"), reading)
    _data(sizes, reading)
    return True


def _mesh(script: Script) -> dict[str, int]:
    """The sizes of the first device mesh with known axis names, by axis; empty if there is none."""
    for call in script.calls("init_device_mesh"):
        names, shape = call.get("mesh_dim_names", 2), call.get("mesh_shape", 1)
        if type(names) is not tuple or type(shape) is not tuple or len(names) != len(shape):
            continue
        pairs = [
            (_NAMES[name], size)
            for name, size in zip(names, shape, strict=True)
            if isinstance(name, str) and name in _NAMES and type(size) is int and size > 0
        ]
        if pairs:
            return dict(pairs)
    return {}


def _tensor(script: Script, degree: int | None, reading: Reading) -> None:
    """Set the tensor degree, and whether activations are sharded along the sequence."""
    if degree is None:
        reading.lose("parallelize_module", "its degree is decided when the script runs; set tensor")
        return
    if degree == 1:
        return
    rows = [call.get("output_layouts") for call in script.calls("RowwiseParallel")]
    divided = any(isinstance(row, Call) and row.name == "Shard" for row in rows)
    more = f", {'with' if divided else 'without'} sequence parallelism"
    reading.given("parallelize_module", {"tensor": degree}, why=more)
    reading.strategy["sequence_parallel"] = divided
    if script.uses("movedim"):
        reading.given("movedim of the ranks", {"tensor_across_nodes": True})


def _context(method: str, degree: int | None, reading: Reading) -> None:
    """Set the context degree and its method, "ring" or "ulysses"."""
    if degree is None:
        reading.lose("Context parallelism", "its degree is decided when the script runs")
    elif degree > 1:
        reading.given("Context parallelism", {"context": degree}, why=f", by {method}")
        reading.strategy["context_method"] = method


def _data(sizes: dict[str, int], reading: Reading) -> None:
    """Set the shard and replicate degrees; without a shard size, the remaining devices shard."""
    shard, replicate = sizes.get("shard"), sizes.get("replicate", 1)
    if shard is None:
        reading.remark("The other devices shard, however many they are.")
        return
    reading.strategy.pop("within_node", None)
    reading.strategy |= {"shard": shard, "replicate": replicate}
    reading.processes = shard * replicate * sizes.get("tensor", 1) * sizes.get("context", 1)
    reading.given("The mesh", {"replicate": replicate, "shard": shard})
