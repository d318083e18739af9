"""Write the results of benchmarks/accuracy.py to the catalogue, docs/accuracy.md and its figure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import adapters
from benchmarks.memory import REASONS as MEMORY_REASONS
from benchmarks.memory import STACKS
from benchmarks.multidim import report as multidim
from shardwise.report.page.chart import Area, Axis, Series, svg_file
from shardwise.spec.catalogue import coefficient

ROOT = Path(__file__).resolve().parents[1]
CATALOGUE = ROOT / "src/shardwise/spec/catalogue/coefficients.toml"
UNITS = {
    "matmul_efficiency": "of the dense peak, for large matmuls",
    "matmul_half_s": "seconds at the peak of a block's pass that reaches half of that",
    "attention_efficiency": "of the dense peak, for the causal half",
    "elementwise_factor": "bytes moved per byte that element-wise operations touch",
    "launch_s": "seconds per kernel, at least",
    "link_efficiency": "of the link inside a node",
    "network_efficiency": "of the network between nodes",
    "hop_latency_s": "seconds per hop inside a node",
    "network_latency_s": "seconds per hop between nodes",
    "contention": "seconds lost per second of compute beside a collective",
    "optimizer_factor": "passes over parameters, gradients and states",
    "tree_efficiency": "of the network between two nodes, for the tree of an all-reduce",
    "tree_falloff": "power of the nodes with which that falls",
    "compiled_elementwise": "of the bytes of element-wise operations, where blocks are compiled",
}
NETWORK_FORM = "; form chosen on measured collectives of 1 to 64 nodes (benchmarks/collectives.py)"
# Known reasons for errors of time, by prefix of the row's id. Each is supported by the row, its
# source or the table.
REASONS = {
    "nano-09": "16 to 32 nodes, with little compute to overlap the network",
    "intern-09": "parameters gathered and gradients reduced over 512 to 1,024 GPUs at 50 Gbps",
    "kemp-11": "H200, at 68 to 77 % of the peak (flagged); no fitted run reaches that",
    "mos23b-0224": "70B on 40 GB runs at the memory limit, with allocator retries",
    "mos23b-023": "13B on 40 GB runs at the memory limit, with allocator retries",
    "misc-115": "recompute not stated; predicted without it",
}
# Mean error of tokens/s of other tools, published or measured by us, on 209 rows of one table.
PEERS = (
    ("llm-analysis, as shipped", "93.5 %"),
    ("llm-analysis, its efficiency set to 0.5 by hand", "16.8 %"),
    ("Calculon (knows ZeRO-1 only)", "29.6 %"),
    ("one constant efficiency per GPU", "12.7 %"),
)


def _reason(name: str, reasons: Mapping[str, str]) -> str:
    return next((why for start, why in reasons.items() if name.startswith(start)), "")


# ---- catalogue ------------------------------------------------------------------------------


def write_all(result: dict[str, Any], page: str, drawing: str) -> None:
    write_catalogue(result)
    (ROOT / "docs" / "accuracy.md").write_text(page)
    (ROOT / "docs" / "accuracy.svg").write_text(drawing)


def write_catalogue(result: dict[str, Any]) -> None:
    """Replace the fitted sections of coefficients.toml."""
    kept, _, fitted = CATALOGUE.read_text().partition("# Fitted by benchmarks/accuracy.py")
    kept = kept.rstrip()
    lines = ["", "", "# Fitted by benchmarks/accuracy.py; rewritten by it.", ""]
    for family, values in result["coefficients"].items():
        for name, value in values.items():
            if name not in UNITS:
                continue
            spread = result["spread"].get(f"{family}.{name}", result["spread"].get(name, 1.0))
            lines += [
                f"[step-{family}.{name}]",
                f'unit = "{UNITS[name]}"',
                f"value = {value:.4g}",
                f"low = {value / spread**1.645:.4g}",
                f"high = {value * spread**1.645:.4g}",
                f'source = "{_source(name, result)}"',
                "",
            ]
    grown, compiled = result["growth"], result["fit_compiled"]["rows"]
    lines += [
        "[interval_nodes]",
        'unit = "nodes up to which three fitted sources have runs; intervals widen beyond"',
        *_exact(f"{grown['nodes']}"),
        'source = "published runs (split=fit)"',
        "",
        "[interval_per_doubling]",
        'unit = "widening of an interval per doubling of nodes, on a logarithmic scale"',
        *_exact(f"{grown['per_doubling']:.3f}"),
        'source = "leaving each fitted source out in turn, not less than 0.1 (assumed)"',
        "",
        "[interval_compiled]",
        'unit = "widening of an interval where blocks are compiled, on a logarithmic scale"',
        *_exact(f"{grown['compiled']:.3f}"),
        'source = "leaving each source of compiled runs (split=aux) out in turn"',
        "",
        "[compiled_runs]",
        'unit = "published runs that the effect of torch.compile was fitted on"',
        *_exact(f"{compiled}"),
        'source = "compiled bf16 runs (split=aux) whose devices and batch are stated"',
        "",
    ]
    factor, apart = result["heldout"]["factor90"], result["heldout"]["comparison"]
    calibrated = result["memory"]["calibration"]
    lines += [
        "[step-interval]",
        'unit = "relative error of a step time that 90 % of runs stay within"',
        f"low = {1 / factor - 1:.3f}",
        f"high = {factor - 1:.3f}",
        'source = "leaving each fitted source out in turn, sources weighing alike"',
        "",
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
    CATALOGUE.write_text(kept + "\n".join([*lines, *_other_sections(fitted, lines)]))


def _other_sections(text: str, lines: list[str]) -> list[str]:
    """Sections among the fitted ones that this file does not write."""
    sections = ["[" + one.strip() for one in text.split("\n[")[1:]]
    return [line for one in sections if one.split("\n")[0] not in lines for line in (one, "")]


def _exact(value: str) -> list[str]:
    """A figure without an interval of its own."""
    return [f"{name} = {value}" for name in ("value", "low", "high")]


def _source(name: str, result: dict[str, Any]) -> str:
    if name == "compiled_elementwise":
        return f"fitted on {result['fit_compiled']['rows']} compiled published runs (split=aux)"
    fitted = f"fitted on {result['fit']['rows']} published runs (split=fit) of A100 and H100"
    return fitted + (NETWORK_FORM if name.startswith(("tree", "hop", "network")) else "")


# ---- page -----------------------------------------------------------------------------------


def report(result: dict[str, Any]) -> str:
    """The text of docs/accuracy.md."""
    tuned = adapters.study()
    return "\n".join(
        [
            *_head(result, tuned["memory"]),
            *_time(result),
            *_memory(result["memory"]),
            *multidim.section(result["multidim"]),
            *adapters.section(tuned),
            *_left_out(result),
        ]
    )


def _table(head: str, rows: list[str]) -> list[str]:
    return [head, "|" + "---|" * (head.count("|") - 1), *rows, ""]


def _shares(r: Mapping[str, float], *names: str) -> str:
    return " | ".join(f"{r[name]:.1%}" for name in names)


def _head(result: dict[str, Any], tuned: Mapping[str, float]) -> list[str]:
    """What a new user can expect: errors on projects that nothing was fitted on."""
    held, unseen, strict = (result[key] for key in ("heldout", "unseen", "unseen_compiled_too"))
    memory = result["memory"]
    return [
        "# Accuracy",
        "",
        "Predicted against measured time and memory of published runs. The coefficients of time "
        f"were fitted on {result['fit']['rows']} rows and tested on {held['rows']} others. "
        "`python benchmarks/accuracy.py --write` writes this page; it needs this repository and "
        'nothing else (`pip install -e ".[calibrate,hf]"`). The runs are in benchmarks/data.',
        "",
        f"- **Time on unseen projects**: {unseen['rows']} held-out rows are of projects without a "
        f"fitted row. Their median error of tokens/s is {unseen['median_error']:.1%}, the mean "
        f"{unseen['mean_error']:.1%}. The effect of compile was fitted on other rows of some of "
        f"these projects; the {strict['rows']} rows of the remaining ones have "
        f"{strict['median_error']:.1%} and {strict['mean_error']:.1%}.",
        f"- **Memory on GPUs**: {memory['rows']} held-out runs that say whether they report "
        f"allocated or reserved memory have a median error of {memory['median_error']:.1%}, mean "
        f"{memory['mean_error']:.1%}. For LoRA and QLoRA ({tuned['rows']} published figures) it is "
        f"{tuned['median_error']:.1%}, the largest {tuned['max_error']:.0%}.",
        "",
    ]


def _time(result: dict[str, Any]) -> list[str]:
    held, base, table = result["heldout"], result["baseline"], result["same_table"]
    columns = ("median_error", "mean_error", "p90_error", "max_error")

    def row(name: str, r: dict[str, Any]) -> str:
        return f"| {name} | {r['rows']} | {_shares(r, *columns)} |"

    return [
        "![Predicted against measured tokens per second](accuracy.svg)",
        "",
        "## Time",
        "",
        *_table(
            "| error of tokens/s | rows | median | mean | 90th percentile | largest |",
            [
                row("**held out**", held),
                row("held out, projects without a fitted row", result["unseen"]),
                row("held out, at least 128 GPUs", result["heldout_large"]),
                row("held out, compiled", result["heldout_compiled"]),
                row("one constant efficiency per device family", base),
                row("fitted rows", result["fit"]),
                row("fitted on 8 GPUs, tested on 16 to 512", result["transfer"]["8_to_512"]),
                row("calibrated on 6 rows per GPU", result["transfer"]["6_rows"]),
            ],
        ),
        "The last two rows use the tables of one project. Calibration starts from coefficients "
        "fitted on other projects and adds, for each GPU, 6 rows from its smallest to its largest "
        "model.",
        "",
        f"The 90 % interval is a factor of {held['factor90']:.2f} up or down. To find it, each "
        "fitted source was left out of the fit once; all sources have the same weight. It covers "
        f"{held['coverage90']:.0%} of the held-out rows. For the constant efficiency, the same "
        f"method gives a factor of {base['factor90']:.2f} and {base['coverage90']:.0%}. The "
        "interval is wide because there are only six fitted sources: without one of them, a device "
        "family may have a single source left.",
        "",
        *_growth(result),
        "Two configurations of one model on one machine share most of that error. The predicted "
        f"ratio of their speeds is within {held['comparison']:.1%} of the measured one in four of "
        f"five of {held['pairs']} pairs of fitted rows (each machine and model weighing alike), "
        f"and in {held['heldout_pairs_within']:.0%} of {held['heldout_pairs']} held-out pairs. "
        "This is the error of comparison: a plan calls smaller differences too close to call.",
        "",
        "Other tools, mean error of tokens/s on 209 rows of one of these tables:",
        "",
        *_table(
            "| tool | mean error |",
            [
                *(f"| {name} | {error} |" for name, error in PEERS),
                f"| Shardwise, on {table['rows']} held-out rows of that project | "
                f"{100 * table['mean_error']:.1f} % |",
                f"| Shardwise, on all {held['rows']} held-out rows | "
                f"{100 * held['mean_error']:.1f} % |",
            ],
        ),
        "Identical configurations changed by -20 to +16 % (median +1 %) when one of these projects "
        "upgraded its software. So errors below 5 % are noise.",
        "",
        "### By source (held out)",
        "",
        *_table(
            "| source | rows | median error | bias |",
            [
                f"| {name} | {s['rows']} | {s['median_error']:.1%} | {s['bias']:+z.1%} |"
                for name, s in result["sources"].items()
            ],
        ),
        "### Largest errors",
        "",
        *_table(
            "| row | source | devices | error | why |",
            [
                f"| {w['id']} | {w['source']} | {w['devices']} | {w['error']:+.0%} "
                f"| {_reason(w['id'], REASONS)} |"
                for w in result["worst"]
            ],
        ),
    ]


def _growth(result: dict[str, Any]) -> list[str]:
    grown, compiled = result["growth"], result["fit_compiled"]
    share = next(iter(result["coefficients"].values()))["compiled_elementwise"]
    return [
        "The interval widens with the distance from what was fitted, on a logarithmic scale: by "
        f"{grown['per_doubling']:.0%} with each doubling beyond {grown['nodes']} nodes, up to "
        "which three fitted sources have runs, and by "
        f"{grown['compiled'] - 1:.0%} where blocks are compiled.",
        "",
        "Collectives: all-gathers and reduce-scatters are rings whose latency grows with every "
        "node; all-reduces take a ring or a tree, whichever is faster. This form follows the "
        "bandwidth measured on 1 to 64 nodes of H100 best (`python benchmarks/collectives.py`); "
        "its coefficients are fitted with the others. The rows of the source that measured these "
        "collectives use the measured bandwidth itself. The form was chosen on fitted rows: each "
        "source left out once, and rows on at least 64 GPUs predicted from smaller ones. Held-out "
        "rows were looked at twice. The first look, at a latency for every rank, showed errors of "
        "-44 to -48 % on 512 GPUs. It was the reason to compare more forms and to use the measured "
        "bandwidth; the comparison itself used fitted rows. So the held-out errors above are not "
        "those of a first look. The second look was at this form.",
        "",
        f"torch.compile: compiled blocks move {share:.0%} of the bytes of element-wise operations. "
        f"This is fitted on {compiled['rows']} compiled runs (bf16, H100; median error "
        f"{compiled['median_error']:.1%}); the other four compiled bf16 runs of that split state "
        "neither batch nor devices, or ran on a device without coefficients.",
        "",
    ]


def _memory(m: dict[str, Any]) -> list[str]:
    columns = ("median_error", "mean_error", "p90_error")
    ratios = ", ".join(f"{ratio:g}" for ratio in m["by_ratio"])
    medians = ", ".join(f"{error:.1%}" for error in m["by_ratio"].values())

    def row(name: str, r: dict[str, Any]) -> str:
        return f"| {name} | {r['rows']} | {_shares(r, *columns)} | {r['bias']:+z.1%} |"

    return [
        "## Memory",
        "",
        "Allocated memory is compared with the predicted peak of tensors, reserved memory with the "
        "middle of the predicted interval of reserved memory. If a source does not say which it "
        "reports, its value is compared with the peak of tensors.",
        "",
        *_table(
            "| error of peak memory (held out) | rows | median | mean | 90th percentile | bias |",
            [
                row("**kind known**", m),
                row("the same, from the table's columns alone", m["columns_only"]),
                *(row(kind, group) for kind, group in sorted(m["kinds"].items())),
            ],
        ),
        f"{m['ran']} published runs give enough detail for a prediction. The verdict is "
        f'"does not fit" for {m["false_oom"]} of them and "at risk" for {m["at_risk"]} '
        f"({m['unseen_at_risk']} of the {m['unseen']} that were not used for calibration). "
        f"{m['did_not_fit']} configurations were published as having crashed or run out of memory. "
        f'For {m["did_not_fit_caught"]:.0%} of them, the verdict is "does not fit" or "at risk". '
        f"Of the other {m['missed']}, the same source lists {m['missed_that_also_ran']} as having "
        "run as well, with their memory: more likely crashes of another kind.",
        "",
        "The usable memory of a device is its memory less "
        f"{coefficient('outside_allocator')[1]:g} GiB outside the allocator, divided by "
        f"{m['calibration']['factor']:.3f}. Nine of ten of {m['calibration']['rows']} measured "
        "runs stay within that factor of the predicted need (fitted runs except ATorch's, see "
        f"below). Of {m['calibration']['ran']} runs of the fitted split, which all ran, "
        f"{m['calibration']['at_risk']} need more and are called at risk. If tensors and "
        f"{coefficient('outside_allocator')[0]:g} GiB outside the allocator, the least that is "
        'assumed, take more than the device has, the verdict is "does not fit"; the tensors of the '
        f"fullest fitted run took {m['calibration']['fullest']:.1%}.",
        "",
        "The data does not show how often a run near the limit fails. Published runs are those "
        "that ran. All failures are from one source, and none of them needs between 88 % and 101 % "
        "of a device. No source gives the memory outside the allocator, so it is assumed.",
        "",
        "No published run that reports reserved memory was available for the fit. The predicted "
        "interval follows from how torch's allocator works (a pool per stream) and from a ratio "
        f"found in other runs; its middle is used. With a ratio of {ratios}, the median error is "
        f"{medians}.",
        "",
        "Settings of a stack that its rows do not state were read in the stack's code. We chose "
        "which code to read by looking at rows with large errors, including held-out rows. So for "
        "a stack that was not examined, expect the errors from the columns alone. No number was "
        f"fitted to these rows. From the columns alone, {m['columns_only']['false_oom']} runs "
        "would be refused, nearly all of them because of a fused cross-entropy that Shardwise has "
        "no setting for.",
        "",
        *_table(
            "| source | setting and where it is stated |",
            [f"| {name} | {stack.because} |" for name, stack in STACKS.items()],
        ),
        "### Memory by source (held out)",
        "",
        *_table(
            "| source | rows | median | mean | 90th percentile | bias |",
            [row(name, group) for name, group in m["sources"].items()],
        ),
        "### Memory errors above 10 %",
        "",
        *_table(
            "| row | split | kind | measured GiB | predicted | error | why |",
            [
                f"| {o['id']} | {o['split']} | {o['kind']} | {o['measured']:.1f} "
                f"| {o['predicted']:.1f} | {o['error']:+.0%} "
                f"| {_reason(o['id'], MEMORY_REASONS)} |"
                for o in m["off"]
            ],
        ),
    ]


def _left_out(result: dict[str, Any]) -> list[str]:
    memory = ", ".join(result["memory"]["left_out"]) or "none"
    return [
        "## Left out",
        "",
        "Time: " + ("; ".join(result["left_out"]) or "none") + ".",
        "",
        f"Memory (batch or recompute not stated): {memory}.",
        "",
    ]


# ---- figure ---------------------------------------------------------------------------------

NEAR = 1.1


def figure(points: list[dict[str, Any]]) -> str:
    """Predicted against measured tokens per second and device, both on logarithmic axes."""
    marks = _marks([p[key] for p in points for key in ("measured", "predicted")])
    low, high = marks[0][0], marks[-1][0]
    within = [(low, low), (low, low * NEAR), (high / NEAR, high), (high, high), (high, high / NEAR),
              (low * NEAR, low)]  # fmt: skip
    families = sorted({p["family"] for p in points})
    series = [
        Series(f"{family} family", [(p["measured"], p["predicted"]) for p in points
                                    if p["family"] == family], "measured", number, line=False)
        for number, family in enumerate(families)
    ]  # fmt: skip
    return svg_file(
        f"Tokens/s per device, predicted against measured: {len(points)} held-out runs",
        Axis.labelled("measured", marks, True), Axis.labelled("predicted", marks, True),
        [Series("", [(low, low), (high, high)], colour=5), *series],
        "Predicted against measured tokens per second: most points lie near the diagonal.",
        areas=[Area("within 10 %", within)], square=True,
    )  # fmt: skip


def _marks(values: list[float]) -> list[tuple[float, str]]:
    """Axis marks 1, 2, 5, 10 ... that enclose all values."""
    least, most = min(values), max(values)
    found = [
        step * 10.0**power
        for power in range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
        for step in (1, 2, 5)
    ]
    low = max(mark for mark in found if mark <= least)
    high = min(mark for mark in found if mark >= most)
    return [(mark, _short(mark)) for mark in found if low <= mark <= high]


def _short(value: float) -> str:
    return f"{value / 1000:g}k" if value >= 1000 else f"{value:g}"
