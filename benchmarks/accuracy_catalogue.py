"""Write the results of benchmarks/accuracy.py to the catalogue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.intervals import NODES
from benchmarks.prices import KNOWN, PARAMETERS, own_parameters

ROOT = Path(__file__).resolve().parents[1]
CATALOGUE = ROOT / "src/shardwise/spec/catalogue/coefficients.toml"
KNOWN_UNITS = {
    "launch_s": "seconds per kernel, at least",
    "optimizer_factor": "passes over parameters, gradients and states in an optimizer step",
    "tree_efficiency": "of the network between two nodes, for the tree of an all-reduce",
    "tree_falloff": "power of the nodes with which that falls",
}
# Of all coefficients that a fit may give a device.
UNITS = {
    **KNOWN_UNITS,
    **{name: one.unit for name, one in PARAMETERS.items()},
    "matmul_efficiency": "of the dense peak, for large matmuls",
    "matmul_half_s": "seconds at the peak of a block's pass that reaches half of that",
    "attention_efficiency": "of the dense peak, for the causal half",
    "link_efficiency": "of the link inside a node",
    "hop_latency_s": "seconds per hop inside a node",
}
NETWORK_FORM = "form chosen on measured collectives of 1 to 64 nodes (benchmarks/collectives.py)"
KNOWN_SOURCES = {
    "launch_s": "assumed: the time from one launch of a small kernel to the next",
    "optimizer_factor": "four tensors read and three written are 1.75 passes over four; at 80 % of "
    "the memory bandwidth",
    "tree_efficiency": NETWORK_FORM,
    "tree_falloff": NETWORK_FORM,
}
FITTED_STACKS = "what is left on fitted rows, stacks weighing alike"
LEFT_OUT_STACKS = "leaving each fitted stack out in turn, stacks weighing alike"
# Of LoRA, and of devices that a relative's kernels stand for.
ADAPTERS, RELATIVE = 1.55, 1.5
ADAPTERS_BETWEEN = 0.27
BLIND_ADAPTERS = "six published runs of LoRA in fp8 on MI325X, predicted blind: 29 to 33 % too slow"


def write_catalogue(result: dict[str, Any]) -> None:
    """Replace the fitted sections of coefficients.toml."""
    kept, _, fitted = CATALOGUE.read_text().partition("# Fitted by benchmarks/accuracy.py")
    kept = kept.rstrip()
    lines = ["", "", "# Fitted by benchmarks/accuracy.py; rewritten by it.", ""]
    rows, intervals = result["fit"]["rows"], result["intervals"]
    values = {name: KNOWN[name] for name in sorted(KNOWN)} | result["coefficients"]
    parameters = {**PARAMETERS, **own_parameters(result["left_out"])}
    for name, value in values.items():
        stack, _, own = name.rpartition(".")
        known = parameters.get(name)
        spread = result["spread"].get(name, 1.0)
        where = f"rows of {stack} among {rows}" if stack else f"{rows} published runs"
        lines += [
            f"[stack-{stack}.{own}]" if stack else f"[step.{name}]",
            f'unit = "{known.unit if known else KNOWN_UNITS[name]}"',
            f"value = {value:.4g}",
            f"low = {value / spread**1.645:.4g}",
            f"high = {value * spread**1.645:.4g}",
            f'source = "fitted on {where}"' if known else f'source = "{KNOWN_SOURCES[name]}"',
            "",
        ]
    known, new = intervals["known"], intervals["new"]
    factors = {
        **{f"{name}-known": (known[name], FITTED_STACKS) for name in known},
        **{f"{name}-new": (max(known[name], new[name]), LEFT_OUT_STACKS) for name in new},
        "adapters-known": (ADAPTERS, BLIND_ADAPTERS),
        "adapters-new": (ADAPTERS, BLIND_ADAPTERS),
        "device": (intervals["device"], "each generation of devices left out of the fit in turn"),
        "relative": (
            RELATIVE,
            "nine published fp8 runs on MI300X and MI325X, predicted blind: 48 % too fast to "
            "33 % too slow",
        ),
    }
    for name, (value, source) in factors.items():
        lines += [
            f"[interval-{name}]",
            'unit = "factor, up or down, that nine of ten runs stay within"',
            *_exact(f"{value:.3f}"),
            f'source = "{source}"',
            "",
        ]
    for kind, whose in (("between", "stacks and devices"), ("within", "runs of one of them")):
        adapters = {"adapters": ADAPTERS_BETWEEN if kind == "between" else intervals[kind]["dense"]}
        for name, value in {**intervals[kind], **adapters}.items():
            lines += [
                f"[{kind}-{name}]",
                f'unit = "standard deviation of ln(predicted / measured) of {whose}"',
                *_exact(f"{value:.3f}"),
                f'source = "{LEFT_OUT_STACKS}"',
                "",
            ]
    lines += [
        "[interval_nodes]",
        'unit = "nodes up to which three fitted stacks have runs; intervals widen beyond"',
        *_exact(f"{NODES}"),
        'source = "published runs (split=fit)"',
        "",
        "[interval_per_doubling]",
        'unit = "widening of an interval per doubling of nodes, on a logarithmic scale"',
        *_exact(f"{intervals['per_doubling']:.3f}"),
        'source = "leaving each fitted stack out in turn, not less than 0.1 (assumed)"',
        "",
        "[low_bit_runs]",
        'unit = "published runs with products in 8 or 4 bits that were fitted"',
        *_exact(f"{result['fit_low_bits']['rows']}"),
        'source = "runs whose devices and batch are stated"',
        "",
        "[compiled_runs]",
        'unit = "published runs of compiled blocks that were fitted"',
        *_exact(f"{result['fit_compiled']['rows']}"),
        'source = "compiled runs whose devices and batch are stated"',
        "",
    ]
    apart = result["heldout"]["comparison"]
    calibrated = result["memory_margin"]
    lines += [
        "[step-comparison]",
        'unit = "relative error of the ratio of two configurations of one model on one machine"',
        *_exact(f"{apart:.3f}"),
        f'source = "four of five of {result["heldout"]["pairs"]} measured pairs (split=fit) are '
        'within it, each machine and model weighing alike"',
        "",
        "[occupied_over_pools]",
        'unit = "bytes taken inside the allocator: of the tensors at least, of the pools at most"',
        "low = 1.0",
        f"high = {calibrated['factor']:.3f}",
        f'source = "the 90th percentile of measured over needed in {calibrated["rows"]} published '
        'runs (mem_split=fit)"',
        "",
    ]
    CATALOGUE.write_text(kept + "\n".join([*lines, *_other_sections(fitted)]))


def _other_sections(text: str) -> list[str]:
    """Sections among the fitted ones that this file does not write: those of contributed runs."""
    sections = ["[" + one.strip() for one in text.split("\n[")[1:]]
    return [line for one in sections if one.startswith("[device-") for line in (one, "")]


def _exact(value: str) -> list[str]:
    """A figure without an interval of its own."""
    return [f"{name} = {value}" for name in ("value", "low", "high")]
