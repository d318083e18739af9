"""The pages docs/accuracy.md and docs/accuracy-tables.md, from the results of accuracy.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import adapters
from benchmarks.memory import REASONS as MEMORY_REASONS
from benchmarks.memory import STACKS
from benchmarks.multidim import report as multidim
from benchmarks.prices import PARAMETERS
from shardwise.spec.catalogue import coefficient
from shardwise.spec.catalogue import figure as catalogued

LEAST = catalogued("least_deviation")
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
REGIMES = {
    "dense": "dense training",
    "RL": "reinforcement learning",
    "experts": "mixtures of experts",
    "adapters": "adapters (LoRA)",
    "low-bit": "products in fp8 or nvfp4",
}
ERRORS = ("median_error", "mean_error", "p90_error", "max_error")


def _reason(name: str, reasons: Mapping[str, str]) -> str:
    return next((why for start, why in reasons.items() if name.startswith(start)), "")


def _table(head: str, rows: list[str]) -> list[str]:
    return [head, "|" + "---|" * (head.count("|") - 1), *rows, ""]


def _shares(r: Mapping[str, float], *names: str) -> str:
    return " | ".join(f"{r[name]:.1%}" for name in names)


def _line(name: str, r: Mapping[str, Any], *names: str) -> str:
    return f"| {name} | {r['rows']} | {_shares(r, *(names or ERRORS))} |"


# ---- the page -------------------------------------------------------------------------------


def page(result: dict[str, Any]) -> str:
    """The text of docs/accuracy.md."""
    tuned = adapters.study()
    return "\n".join(
        [
            *_head(result, tuned["memory"]),
            *_origins(result),
            *_time(result),
            *_intervals(result),
            *_memory(result["memory"], result["y2026"]["memory"]),
        ]
    )


def _head(result: dict[str, Any], tuned: Mapping[str, float]) -> list[str]:
    """What a new user can expect: errors on stacks and projects that nothing was fitted on."""
    alone, unseen, memory = result["left_out_by_regime"], result["unseen"], result["memory"]
    given, dense = result["one_step_given"]["dense"], alone["dense"]
    return [
        "# Accuracy",
        "",
        "Predicted against measured time and memory of runs that others published. "
        "`python benchmarks/accuracy.py --write` writes this page and [its tables]"
        "(accuracy-tables.md); it needs this repository and nothing else "
        '(`pip install -e ".[calibrate,hf]"`). The runs are in benchmarks/data.',
        "",
        f"- **Time of a stack that nobody has measured**: each of {len(result['left_out'])} stacks "
        f"was left out of the fit whole. On {dense['rows']} dense runs, the median error of "
        f"tokens/s is {dense['median_error']:.1%}, the 90th percentile {dense['p90_error']:.1%}.",
        f"- **Time on unseen projects**: {unseen['rows']} held-out rows are of projects without a "
        f"fitted row. Their median error of tokens/s is {unseen['median_error']:.1%}, the mean "
        f"{unseen['mean_error']:.1%}.",
        "- **Time with one measured step of yours**: another run of the same stack and GPU is "
        f"then predicted with a median error of {given['median_error']:.1%}, 90th percentile "
        f"{given['p90_error']:.1%}.",
        f"- **Memory on GPUs**: {memory['rows']} held-out runs that say whether they report "
        f"allocated or reserved memory have a median error of {memory['median_error']:.1%}, mean "
        f"{memory['mean_error']:.1%}. For LoRA and QLoRA ({tuned['rows']} published figures) it is "
        f"{tuned['median_error']:.1%}, the largest {tuned['max_error']:.0%}.",
        f"- **Where it is wrong**: reinforcement learning ({alone['RL']['rows']} runs of one "
        f"stack, left out: {alone['RL']['median_error']:.0%}) and mixtures of experts "
        f"({alone['experts']['rows']} runs, left out: {alone['experts']['median_error']:.0%}).",
        "",
        "![Predicted against measured tokens per second](accuracy.svg)",
        "",
    ]


def _origins(result: dict[str, Any]) -> list[str]:
    values, spread, stacks = result["coefficients"], result["spread"], result["identified"]

    def row(name: str) -> str:
        known = PARAMETERS[name]
        low, high = values[name] / spread[name] ** 1.645, values[name] * spread[name] ** 1.645
        seen = stacks.get(name, 0)
        by = f"{seen} stacks" if seen > 1 else "not identified: one stack" if seen else "no run"
        return f"| `{name}` | {known.unit} | {values[name]:.3g} ({low:.3g} to {high:.3g}) | {by} |"

    levels = ", ".join(
        f"{name.removesuffix('.level')} {value:.2f}"
        for name, value in values.items()
        if name.endswith(".level")
    )
    return [
        "## What comes from kernels, what from runs",
        "",
        "Matrix products, attention and the links inside a node come from "
        "[published kernel measurements](concepts/kernels.md) of the device; which attention "
        "kernel runs, from the software (`shardwise catalog software`). Runs give only what "
        f"kernels cannot. It was fitted on {result['fit']['rows']} runs of "
        f"{len(result['left_out'])} stacks together:",
        "",
        *_table(
            "| coefficient | what it is | value (90 % interval) | identified by |",
            [row(name) for name in PARAMETERS if name in values],
        ),
        "Besides, each stack has a level: the seconds of its steps per second predicted. "
        f"{levels}. A stack without runs has 1. Attention of one stack and the host's time of "
        "another are fitted to its own runs alone.",
        "",
    ]


def _time(result: dict[str, Any]) -> list[str]:
    held, base, alone = result["heldout"], result["baseline"], result["left_out_by_regime"]
    given = result["one_step_given"]
    recent = result["y2026"]["time"]
    lines = [
        _line("**stacks left out whole**: dense, tables to 2024", alone["old"]),
        *(_line(f"… {REGIMES[name]}, all years", alone[name]) for name in REGIMES if name in alone),
        *(
            _line(f"one step of that stack and GPU given: {REGIMES[name]}", given[name])
            for name in REGIMES
            if name in given
        ),
        _line("**held out, runs to 2024**", held),
        _line("… projects without a fitted row", result["unseen"]),
        _line("… at least 128 GPUs", result["heldout_large"]),
        _line("… compiled", result["heldout_compiled"]),
        _line("… one constant efficiency per device family", base),
    ]
    lines += [
        _line("**held out, runs of 2024 to 2026**", recent["heldout"]),
        *(
            _line(f"… {REGIMES[name]}", group)
            for name, group in recent["heldout"]["regimes"].items()
        ),
        _line("fitted rows", result["fit"]),
        _line("fitted on 8 GPUs, tested on 16 to 512", result["transfer"]["8_to_512"]),
        _line("calibrated on 6 rows per GPU", result["transfer"]["6_rows"]),
    ]
    table = result["same_table"]
    return [
        "## Time",
        "",
        *_table("| error of tokens/s | rows | median | mean | 90th percentile | largest |", lines),
        "The last two rows use the tables of one project. Identical configurations changed by -20 "
        "to +16 % (median +1 %) when that project upgraded its software: errors below 5 % are "
        "noise.",
        "",
        "Two configurations of one model on one machine share most of an error. The predicted "
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
        *_looks(),
    ]


def _looks() -> list[str]:
    return [
        "Held-out rows of the tables to 2024 were looked at four times: twice while the form of "
        "collectives was chosen, the first of which was the reason to compare more forms, and "
        "twice with the prices from kernels. So their errors are not those of a first look.",
        "",
        "Held-out runs of 2024 to 2026 were looked at four times, with the same coefficients. The "
        "first look (median error of all 105: 24 %) showed that this comparison counted the tokens "
        "of a tensor or context group on each of its devices. The second (11.3 %, 90th percentile "
        "40.5 %) showed that it read racks of 72 GPUs as nodes of 4, and that the interval of fp8, "
        "narrower than that of bf16, covered 45 %; no interval is narrower than that now. After "
        "the third (11.1 %, 32.9 %), runs of MLPerf's LoRA were read as their code says: adapters "
        "on attention alone, frozen weights and inputs of SwiGLU in fp8. The table shows the "
        "fourth.",
        "",
    ]


def _intervals(result: dict[str, Any]) -> list[str]:
    found, held = result["intervals"], result["heldout"]

    def factor(value: float) -> str:
        return f"{value:.2f}"

    rows = [
        f"| {REGIMES[name]} | {factor(found['known'][name])} | {factor(found['new'][name])} "
        f"| {factor(found['new'][name] ** narrowed(found, name))} |"
        for name in found["known"]
    ]
    recent = result["y2026"]["time"]["heldout"]
    covered = [
        f"| {which} | {one['rows']} | {one['coverage90']:.0%} |"
        for which, one in (
            ("held out, runs to 2024", held),
            ("held out, runs of 2024 to 2026", recent),
            *((f"… {REGIMES[name]}", group) for name, group in recent["regimes"].items()),
        )
    ]
    return [
        "## Intervals",
        "",
        "The interval of a predicted speed is a factor up or down that nine of ten runs stay "
        "within. It is found by leaving out: of a stack with a fitted level its other releases or "
        "models, of any other stack the whole stack. Stacks weigh alike, however many rows they "
        "have.",
        "",
        *_table("| runs | a stack with a fitted level | any other stack | … with one step |", rows),
        f"Other widths add in squares: a factor of {factor(found['device'])} on a device without "
        "fitted runs whose kernels were measured (each generation of devices left out in turn). "
        f"Intervals widen by {found['per_doubling']:.0%} with each doubling beyond 16 nodes, on a "
        "logarithmic scale.",
        "",
        *_table("| runs | rows | inside the interval |", covered),
    ]


def narrowed(found: Mapping[str, Any], regime: str) -> float:
    """The width of an interval with one measured step, relative to before."""
    between, within = (max(LEAST, found[kind][regime]) for kind in ("between", "within"))
    left = between**2 * within**2 / (between**2 + within**2)
    return float(((within**2 + left) / (within**2 + between**2)) ** 0.5)


def _memory(m: dict[str, Any], recent: Mapping[str, Any]) -> list[str]:
    return [
        "## Memory",
        "",
        "Allocated memory is compared with the predicted peak of tensors, reserved memory with the "
        "middle of the predicted interval of reserved memory.",
        "",
        *_table(
            "| error of peak memory (held out) | rows | median | mean | 90th percentile | bias |",
            [_memory_line("**kind known**", m),
             _memory_line("the same, from the table's columns alone", m["columns_only"])],
        ),
        f"{m['ran']} published runs give enough detail for a prediction. The verdict is "
        f'"does not fit" for {m["false_oom"]} of them and "at risk" for {m["at_risk"]}. '
        f"{m['did_not_fit']} configurations were published as having crashed or run out of memory; "
        f'for {m["did_not_fit_caught"]:.0%} of them the verdict is "does not fit" or "at risk".',
        "",
        *_recent_memory(recent),
        "All tables, by source and by row, are on [the next page](accuracy-tables.md).",
        "",
    ]  # fmt: skip


def _recent_memory(recent: Mapping[str, Any]) -> list[str]:
    """Reserved memory of the runs of 2024 to 2026, by split and regime."""
    lines = [
        f"| {name} | {one['rows']} | {_shares(one, 'median_error', 'p90_error')} "
        f"| {one['bias']:+z.1%} | {one['coverage90']:.0%} |"
        for title, study in (("fitted", recent["fit"]), ("held out", recent["heldout"]))
        for name, one in (
            (f"**{title}**", study),
            *((f"… {REGIMES[name]}", group) for name, group in study["regimes"].items()),
        )
    ]
    refused = len(recent["heldout"]["refused"])
    return [
        *_table(
            "| runs of 2024 to 2026, reserved memory | rows | median | 90th percentile | bias "
            "| inside the interval |",
            lines,
        ),
        f"Tensors alone are predicted not to fit for {refused} of the held-out ones. Those outside "
        "their interval are LoRA on experts, runs in nvfp4, whose kept inputs are counted in bf16, "
        "and three that miss an end of it by less than 4 %. They were looked at twice: before the "
        "second look, 7 runs of LoRA in fp8 were predicted not to fit, and 60 % were covered.",
        "",
    ]


def _memory_line(name: str, r: Mapping[str, Any]) -> str:
    shares = _shares(r, "median_error", "mean_error", "p90_error")
    return f"| {name} | {r['rows']} | {shares} | {r['bias']:+z.1%} |"


# ---- the tables -----------------------------------------------------------------------------


def tables(result: dict[str, Any]) -> str:
    """The text of docs/accuracy-tables.md."""
    return "\n".join(
        [
            "# Accuracy: all tables",
            "",
            "The tables behind [the accuracy page](accuracy.md), written by the same command.",
            "",
            *_stacks(result),
            *_recent(result["y2026"]["time"]),
            *_by_source(result),
            *_collectives(),
            *_memory_tables(result["memory"]),
            *multidim.section(result["multidim"]),
            *adapters.section(adapters.study()),
            *_left_out(result),
        ]
    )


def _stacks(result: dict[str, Any]) -> list[str]:
    return [
        "## Time: stacks left out whole",
        "",
        *_table(
            "| stack | rows | median | mean | 90th percentile | largest | bias |",
            [
                f"{_line(name, one)} {one['bias']:+z.1%} |"
                for name, one in result["left_out"].items()
            ],
        ),
    ]


def _recent(recent: Mapping[str, Any]) -> list[str]:
    found: list[str] = []
    for split, title in (("fit", "fitted"), ("heldout", "held out")):
        if split not in recent:
            continue
        one = recent[split]
        found += [
            f"## Time: runs of 2024 to 2026, {title}",
            "",
            *_table(
                "| runs | rows | median | mean | 90th percentile | largest | bias | covered |",
                [
                    f"{_line(name, group)} {group['bias']:+z.1%} | {group['coverage90']:.0%} |"
                    for name, group in (("**all**", one), *one["regimes"].items())
                ],
            ),
            *_table(
                "| source | rows | median error | bias |",
                [
                    f"| {name} | {s['rows']} | {s['median_error']:.1%} | {s['bias']:+z.1%} |"
                    for name, s in one["sources"].items()
                ],
            ),
            *_table(
                "| not predicted because of | rows |",
                [f"| {why} | {rows} |" for why, rows in one["left_out"].items()],
            ),
        ]
    return found


def _by_source(result: dict[str, Any]) -> list[str]:
    return [
        "## Time by source (held out, runs to 2024)",
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


def _collectives() -> list[str]:
    return [
        "## Collectives between nodes",
        "",
        "All-gathers and reduce-scatters are rings whose latency grows with every node; "
        "all-reduces take a ring or a tree, whichever is faster. This form follows the bandwidth "
        "measured on 1 to 64 nodes of H100 best (`python benchmarks/collectives.py`); its "
        "coefficients are fitted with the others. The rows of the source that measured these "
        "collectives use the measured bandwidth itself. The form was chosen on fitted rows: each "
        "source left out once, and rows on at least 64 GPUs predicted from smaller ones. The first "
        "look at held-out rows, at a latency for every rank, showed errors of -44 to -48 % on 512 "
        "GPUs.",
        "",
    ]


def _memory_tables(m: dict[str, Any]) -> list[str]:
    ratios = ", ".join(f"{ratio:g}" for ratio in m["by_ratio"])
    medians = ", ".join(f"{error:.1%}" for error in m["by_ratio"].values())
    row = _memory_line
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
        "Time: " + ("; ".join(result["undescribed"]) or "none") + ".",
        "",
        f"Memory (batch or recompute not stated): {memory}.",
        "",
    ]
