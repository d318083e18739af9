"""Matmuls, t0 + FLOPs / (e P); grouped ones, e T / (T + m0); the head of a model with its loss.

A whole MLP of experts also routes and combines tokens, which moves bytes: that takes a share of its
products which falls with their width.

Only shapes like those of training: 1,024 rows, 512 columns and 512 in between at least. A fp8 or
fp4 matmul of a serving engine includes the cast of its inputs, which takes a share of the product
that falls with its columns.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import numpy as np

from benchmarks.kernels.fitting import Form, Numbers, Prior, Values
from benchmarks.kernels.study import Key, Problem, Result, Skipped, grouped, solve, too_few
from benchmarks.kernels.tables import Row, read
from shardwise.spec.kernels import grouped_s, product_s

EFFICIENCY = Prior(0.6, 1.0, high=1.0)
# cuBLAS, and what engines call for it.
LIBRARY = "library"
# Kernels by what their libraries are called.
MATMULS = (
    ("AITER", "AITER tuned"),
    ("hipBLASLt default", "hipBLASLt default"),
    ("hipBLASLt tuned", "hipBLASLt tuned"),
    ("DeepGemmFp8Block", "blocks of 128 (vLLM)"),
    ("TritonFp8Block", "blocks of 128, Triton (vLLM)"),
    ("deepgemm", "blocks of 128"),
    ("DeepGEMM", "blocks of 128"),
    ("fp8_scaled_mm", "CUTLASS (SGLang)"),
    ("cutedsl", "CuTe DSL (FlashInfer)"),
    ("CuteDsl", "CuTe DSL (FlashInfer)"),
    ("flashinfer_cutlass", "CUTLASS (FlashInfer)"),
    ("FlashInferCutlass", "CUTLASS (FlashInfer)"),
)
PASS_OF = {"TN": "forward", "NN": "dgrad", "NT": "wgrad"}


def matmul_studies() -> Iterator[Result]:
    """Every device and dtype of the table of matmuls."""
    for key, rows in grouped(read("matmul"), _matmul_key).items():
        sides = np.asarray([[row.number(side) for side in "mnk"] for row in rows])
        flops = 2.0 * sides.prod(axis=1)
        reason = too_few(flops)
        if reason:
            yield Skipped(key, len(rows), reason)
            continue
        priors = {"efficiency": EFFICIENCY, "call_s": Prior(8e-6, 1.0)}
        if _casts(rows):
            priors["cast_width"] = Prior(1000.0, 1.0)
        yield _product(key, rows, flops, sides[:, 1], priors)


def _matmul_key(row: Row) -> Key | None:
    if row.number("m") < 1024 or row.number("n") < 512 or row.number("k") < 512:
        return None
    cells = row.cells
    dtype = cells["dtype"].replace("fp16", "bf16")
    return Key(row.device, "matmul", _matmul_name(row), dtype)


def _matmul_name(row: Row) -> str:
    cells = row.cells
    library = cells["library"]
    if row.source.startswith("MooreThreads"):
        return f"TransformerEngine {PASS_OF[cells['layout']]}"
    if "best shape" in cells["note"] or "sustained" in cells["inputs"]:
        return "best shape" if "best shape" in cells["note"] else "sustained"
    otherwise = "blocks of 128" if "block scales" in cells["note"] else LIBRARY
    return next((name for part, name in MATMULS if part in library), otherwise)


def _casts(rows: list[Row]) -> bool:
    """Whether a serving engine measured them in a narrow format."""
    engines = ("sglang", "trtllm", "vllm")
    narrow = rows[0].cells["dtype"] in ("fp8", "nvfp4", "mxfp8")
    return narrow and any(row.cells["library"].startswith(engines) for row in rows)


def _product(
    key: Key, rows: list[Row], flops: Numbers, width: Numbers, priors: dict[str, Prior]
) -> Result:
    peak = rows[0].peak

    def form(v: Values) -> Numbers:
        cast = v.get("cast_width", 0.0)
        seconds: Numbers = product_s(flops, width, peak, v["efficiency"], v["call_s"], cast)
        return seconds

    seconds = np.asarray([row.number("ms") for row in rows]) / 1e3
    return solve(key, Problem(rows, seconds, form, priors, flops, peak, {}))


# ---- grouped --------------------------------------------------------------------------------

WHOLE = "expert MLP"
SERVED = re.compile(r"^(sglang|trtllm|vllm) (.*)$")
ENGINES = {"sglang": "SGLang", "trtllm": "TRT-LLM", "vllm": "vLLM"}
LIBRARIES = {
    "Liger liger": "Liger fused MoE",
    "TE GroupedLinear": "TransformerEngine GroupedLinear",
    "torchao mxfp8 grouped": "torchao",
}
# Not grouped: one launch an expert.
LOOPS = ("Liger huggingface", "cuBLAS loop")
KINDS = (
    ("flashinfer_cutlass", "FlashInfer CUTLASS"),
    ("flashinfer_trtllm", "FlashInfer TRT-LLM"),
    ("deepgemm", "DeepGEMM"),
    ("cutlass", "CUTLASS"),
    ("triton", "Triton"),
    ("fused_moe", "Triton"),
)


def grouped_studies() -> Iterator[Result]:
    """Every device and kernel of the table of grouped matmuls."""
    for key, rows in grouped(read("grouped_matmul"), _grouped_key).items():
        tokens = np.asarray([row.number("tokens_per_expert") for row in rows])
        reason = too_few(tokens)
        if reason:
            yield Skipped(key, len(rows), reason)
            continue
        peak = rows[0].peak
        seconds = np.asarray([row.number("ms") for row in rows]) / 1e3
        flops = np.asarray([row.flops for row in rows])
        width = np.asarray([row.number("n") for row in rows])
        form = _grouped_form(flops, tokens, width, peak)
        priors = {"efficiency": EFFICIENCY, "half_tokens": Prior(200.0, 1.0)}
        if key.kernel.startswith(WHOLE):
            priors |= {"routed_width": Prior(300.0, 1.5), "call_s": Prior(3e-5, 1.0)}
        yield solve(key, Problem(rows, seconds, form, priors, tokens, peak, {}))


def _grouped_form(flops: Numbers, tokens: Numbers, width: Numbers, peak: float) -> Form:
    def seconds(v: Values) -> Numbers:
        found: Numbers = grouped_s(
            flops,
            tokens,
            width,
            peak,
            v["efficiency"],
            v["half_tokens"],
            v.get("routed_width", 0.0),
            v.get("call_s", 0.0),
        )
        return found

    return seconds


def _grouped_key(row: Row) -> Key | None:
    cells = row.cells
    if cells["balance"] != "balanced" or not cells["ms"] or not cells["tokens_per_expert"]:
        return None
    served = SERVED.match(cells["library"])
    if served:
        # Few tokens an expert: reading weights takes the time. Experts on several devices: what
        # one device gets is not stated.
        if row.number("tokens_per_expert") < 64 or not _alone(cells["note"]):
            return None
        kind = next((name for part, name in KINDS if part in served[2]), served[2])
        name = f"{WHOLE}, {kind} ({ENGINES[served[1]]})"
    else:
        if cells["library"] in LOOPS:
            return None
        way = {"fwd": "forward", "fwd+bwd": "forward and backward", "bwd": "backward"}
        passed = cells["pass"].removesuffix(" fp32 accumulate")
        library = LIBRARIES.get(cells["library"], cells["library"])
        name = f"{library}, {way.get(passed, passed)}"
    return Key(row.device, "grouped", name, cells["dtype"])


def _alone(note: str) -> bool:
    """Whether all experts are on the device."""
    return "ep 1" in note.split("; ")


# ---- head -----------------------------------------------------------------------------------

IMPLEMENTATIONS = {
    "huggingface": "plain",
    "liger": "fused (Liger)",
    "liger CuTe": "fused (Liger CuTe)",
    "verl fused": "fused (verl)",
}


def head_studies() -> Iterator[Result]:
    """The projection to the vocabulary and its loss, by the FLOPs of its matmuls."""
    rows = [r for r in read("elementwise") if r.cells["op"] == "fused_linear_cross_entropy"]
    for key, mine in grouped(rows, _head_key).items():
        peak = {"A100-80GB": 312e12, "H100-SXM": 989.5e12}[key.device]
        hidden = np.asarray([float(re.findall(r"H=(\d+)", r.cells["note"])[0]) for r in mine])
        made = np.asarray([r.number("rows") * r.number("cols") for r in mine]) * hidden
        flops = {"forward": 2.0, "backward": 4.0}.get(key.kernel.split(",")[0], 6.0) * made
        if "fused (Liger)" in key.kernel:
            # Its forward computes the gradients too.
            flops = 6.0 * made
        seconds = np.asarray([r.number("ms") for r in mine]) / 1e3
        # Where only a rate was published, the time follows from it.
        rates = np.asarray([r.number("tflops") for r in mine]) * 1e12
        seconds = np.where(seconds > 0, seconds, flops / rates)
        reason = too_few(flops)
        if reason:
            yield Skipped(key, len(mine), reason)
            continue

        def form(v: Values, flops: Numbers = flops, peak: float = peak) -> Numbers:
            found: Numbers = product_s(flops, 1.0, peak, v["efficiency"], v["call_s"])
            return found

        priors = {"efficiency": EFFICIENCY, "call_s": Prior(1e-3, 3.0)}
        yield solve(key, Problem(mine, seconds, form, priors, flops, peak, {}))


def _head_key(row: Row) -> Key | None:
    cells = row.cells
    ways = {"fwd": "forward", "bwd": "backward", "fwd+bwd": "forward and backward"}
    name = f"{ways[cells['pass']]}, {IMPLEMENTATIONS[cells['library']]}"
    return Key(row.device, "head", name, cells["dtype"])
