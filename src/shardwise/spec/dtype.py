"""Number formats, by the short names people use."""

from __future__ import annotations

from typing import Literal

DType = Literal["fp64", "fp32", "bf16", "fp16"]

# Dtypes of matrix products only: 8 bits with a scale per tensor (fp8) or per 32 values (mxfp8),
# 4 bits with a scale per 16 values (nvfp4).
LinearDType = Literal["fp8", "mxfp8", "nvfp4"]

DTYPE_BYTES: dict[DType, int] = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
# The names in torch and other libraries.
TORCH_NAMES: dict[DType, str] = {
    "fp64": "float64",
    "fp32": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
}
