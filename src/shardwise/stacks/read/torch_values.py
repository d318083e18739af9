"""Values that a script passes to FSDP1, FSDP2 or autocast: dtypes, policies, meshes."""

from __future__ import annotations

from typing import Any

from shardwise.spec.dtype import TORCH_NAMES, DType
from shardwise.stacks.read.imported import Reading, list_unknown
from shardwise.stacks.read.source import Call, Symbol, script_value_text, unused_reason

# Short names of dtypes by every name that torch has for them.
DTYPES: dict[str, DType] = {
    **{name: dtype for dtype, name in TORCH_NAMES.items()},
    "float": "fp32",
    "half": "fp16",
    "double": "fp64",
}


_POLICIES = ("MixedPrecision", "MixedPrecisionPolicy")
_POLICY_FIELDS = ("param_dtype", "reduce_dtype", "buffer_dtype", "keep_low_precision_grads",
                  "cast_forward_inputs", "cast_root_forward_inputs", "output_dtype",
                  "_module_classes_to_ignore")  # fmt: skip


def read_mixed_precision(value: Any, reading: Reading) -> None:
    """Read the dtypes of a MixedPrecision or MixedPrecisionPolicy; None means fp32 for all."""
    if value is None:
        dtypes = {"param_dtype": "fp32", "reduce_dtype": "fp32"}
        reading.remark("Without mixed precision, parameters and gradients move in fp32.", dtypes)
        return
    if not isinstance(value, Call) or value.more or value.name not in _POLICIES:
        reading.lose("mixed precision", f"{unused_reason(value)}; set param_dtype and reduce_dtype")
        return
    param = _dtype(value.get("param_dtype", 0), "param_dtype", "fp32", reading)
    reduce = _dtype(value.get("reduce_dtype", 1), "reduce_dtype", param, reading)
    found = {"param_dtype": param, "reduce_dtype": reduce}
    known = {name: dtype for name, dtype in found.items() if dtype is not None}
    if known:
        reading.given(value.name, known)
    if value.get("buffer_dtype") is not None:
        reading.explain("buffer_dtype", "FSDP2 leaves buffers in the dtype they have")
    _others(value, reading)


def _others(policy: Call, reading: Reading) -> None:
    """Report other settings of the policy, and keys that are unknown."""
    if policy.get("keep_low_precision_grads") not in (None, False):
        reading.lose("keep_low_precision_grads", "Shardwise keeps gradients in the master dtype")
    if policy.get("output_dtype") is not None:
        reading.lose("output_dtype", "Shardwise keeps outputs in the dtype they are computed in")
    for name in ("cast_forward_inputs", "cast_root_forward_inputs"):
        if policy.get(name) not in (None, True):
            reading.explain(name, "models take token ids, which are not cast")
    list_unknown(reading, policy.keywords, _POLICY_FIELDS, f"{policy.name}.")


def _dtype(value: Any, key: str, otherwise: str | None, reading: Reading) -> str | None:
    """The short name of a dtype in a script; `otherwise` if the script gives none.

    None if the value is known only at run time, which is reported.
    """
    if value is None:
        return otherwise
    if isinstance(value, Symbol) and value.last in DTYPES:
        return DTYPES[value.last]
    reading.lose(key, f"{unused_reason(value)}; set it yourself")
    return None


def read_mesh(value: Any, reading: Reading) -> None:
    """Read the sizes of a device mesh: one axis shards; of two axes the first replicates."""
    if value is None:
        return
    shape = value.get("mesh_shape", 1) if isinstance(value, Call) else value
    sizes = shape if isinstance(shape, tuple) else ()
    if not all(isinstance(size, int) and size > 0 for size in sizes) or len(sizes) not in (1, 2):
        fixed = sizes and all(isinstance(size, int) for size in sizes)
        why = "has no counterpart in Shardwise" if fixed else "is decided when the script runs"
        said = " x ".join(map(script_value_text, sizes)) if sizes else script_value_text(shape)
        reading.warn(f"The mesh of {said} {why}; shard and replicate follow from the cluster.")
        return
    replicate, shard = sizes if len(sizes) == 2 else (1, sizes[0])
    reading.strategy.pop("within_node", None)
    reading.processes = replicate * shard
    if replicate > 1 and shard > 1:
        reading.given("The mesh", {"replicate": replicate, "shard": shard})


def is_number(value: object) -> bool:
    """Whether a value is a number; a boolean is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
