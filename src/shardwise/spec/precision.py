"""The words of `--precision`: dtypes of compute, gathers and matrix products at once."""

from __future__ import annotations

from typing import get_args

from shardwise.spec.dtype import LinearDType
from shardwise.spec.record import SpecError, did_you_mean

PRECISIONS: dict[str, dict[str, object]] = {
    "bf16": {"param_dtype": "bf16", "reduce_dtype": "fp32"},
    "fp16": {"param_dtype": "fp16", "reduce_dtype": "fp32"},
    "fp32": {"param_dtype": "fp32", "reduce_dtype": "fp32"},
    **{
        name: {"param_dtype": "bf16", "reduce_dtype": "fp32", "linear_dtype": name}
        for name in get_args(LinearDType)
    },
}


def parse_precision(text: str) -> dict[str, object]:
    """Strategy fields from `--precision`: the compute and gather dtype; reduction is in fp32.

    A precision of fewer than 16 bits applies to products of linear layers; the rest is bf16.
    """
    if text not in PRECISIONS:
        raise SpecError(
            f"precision: {text[:60]!r} is not one of {', '.join(PRECISIONS)}"
            f"{did_you_mean(text, PRECISIONS)}"
        )
    return dict(PRECISIONS[text])
