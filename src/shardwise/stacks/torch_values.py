"""Values of torch that a script gives to FSDP1, FSDP2 or autocast: dtypes, policies, meshes."""

from __future__ import annotations

from typing import Any

from shardwise.spec.dtype import TORCH_NAMES, DType
from shardwise.stacks.imported import Reading
from shardwise.stacks.source import Call, Symbol, shown

# By every name that torch has for them.
DTYPES: dict[str, DType] = {
    **{name: dtype for dtype, name in TORCH_NAMES.items()},
    "float": "fp32",
    "half": "fp16",
    "double": "fp64",
}


def read_mixed_precision(value: Any, reading: Reading) -> None:
    """The dtypes of a MixedPrecision or MixedPrecisionPolicy; without one, all is fp32."""
    if value is None:
        reading.strategy |= {"param_dtype": "fp32", "reduce_dtype": "fp32"}
        reading.note("Without mixed precision, parameters and gradients move in fp32.")
        return
    if not isinstance(value, Call) or value.more:
        reading.lose(f"mixed precision: {shown(value)} is decided when the script runs.")
        return
    param = _dtype(value.get("param_dtype", 0), "param_dtype", "fp32", reading)
    reduce = _dtype(value.get("reduce_dtype", 1), "reduce_dtype", param, reading)
    reading.strategy |= {"param_dtype": param, "reduce_dtype": reduce}
    reading.note(f"{value.name} becomes param_dtype = {param}, reduce_dtype = {reduce}.")
    if value.get("buffer_dtype") is not None:
        reading.note("buffer_dtype: FSDP2 leaves buffers in the dtype they have.")


def _dtype(value: Any, key: str, otherwise: str, reading: Reading) -> str:
    if value is None:
        return otherwise
    if isinstance(value, Symbol) and value.last in DTYPES:
        return DTYPES[value.last]
    reading.lose(f"{key}: {shown(value)} is decided when the script runs; read as {otherwise}.")
    return otherwise


def read_mesh(value: Any, reading: Reading) -> None:
    """A device mesh of numbers: one axis shards, of two the first replicates."""
    if value is None:
        return
    shape = value.get("mesh_shape", 1) if isinstance(value, Call) else value
    sizes = shape if isinstance(shape, tuple) else ()
    if not all(isinstance(size, int) and size > 0 for size in sizes) or len(sizes) not in (1, 2):
        reading.lose(
            f"The mesh of {shown(shape)} is decided when the script runs; shard and replicate "
            "follow from the cluster."
        )
        return
    replicate, shard = sizes if len(sizes) == 2 else (1, sizes[0])
    reading.strategy.pop("within_node", None)
    reading.processes = replicate * shard
    if replicate > 1 and shard > 1:
        reading.strategy |= {"replicate": replicate, "shard": shard}
        reading.note(f"The mesh becomes replicate = {replicate}, shard = {shard}.")
