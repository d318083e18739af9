"""Predicted against published memory of LoRA and QLoRA runs, and time of published fine-tuning.

    python -m benchmarks.adapters [--json] [--write]

Memory figures are in published_adapters.csv, each with its source; `shardwise estimate` with the
options of a row gives the prediction. Step times are read from benchmarks/data/multidim. Nothing is
fitted here. `--write` updates the section in docs/accuracy-tables.md.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shlex
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import shardwise
from benchmarks.validation import FOLDER
from shardwise.spec.adapter import Adapter, parse_adapter
from shardwise.spec.catalogue import traced as kept_trace
from shardwise.spec.record import SpecError
from shardwise.step.profile import StepProfile

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "accuracy-tables.md"
FIGURES = HERE / "published_adapters.csv"
UNITS = {"GB": 1e9, "GiB": 2.0**30}
# Errors up to this size need no reason.
NEAR = 0.10

# Why an error is above 10 %, by the beginning of the row's name (a pattern); the longest counts.
_PER_LOGIT = (
    "grows by 0.15 MB per token more than predicted, the size of one more fp32 copy of the logits: "
    "transformers casts and shifts them. More than half of the difference"
)
REASONS: dict[str, str] = {
    "qwen-.*-qlora": "kind not stated, near or inside the device memory; GPTQ weights, not NF4",
    "qwen-7b-lora-4096": "kind not stated, inside the predicted device memory",
    "qwen-14b-qlora-8192": "the figures grow by 1.2 MB per token here and by 3.1 MB for LoRA of "
    "the same model: not explained; predicted 2.3 MB, mostly logits",
    "qwen-7b-lora-2x2": "DeepSpeed's ZeRO-2 holds frozen weights once; predicted is fully_shard, "
    "which holds a shard of them too (4.0 GB)",
    "qwen-.*-emb": "embedding and head are likely trained in bf16, states too; predicted with "
    "fp32 weights, gradients and states",
    "litgpt": "grows by 1.4 MB per token more than predicted, likely the dropout and the padded "
    "adapters of its fused QKV matrix",
    "litgpt-.*-qlora": "as litgpt-7b-lora-b2; the other 1.6 to 2.3 GB are not explained (bf16 and "
    "4 bits differ by less than the weights)",
    "litgpt-.*-fsdp": "more than the complete model in bf16 on each GPU: likely the peak of "
    "loading, before it is sharded",
    "torchtune-7b-qlora": "reserved before the first step, while the model was built (9.13 GB "
    "published for that), and likely kept by the allocator",
    "torchtune-70b": "kind and options of the recipe not stated; predicted holds root and three "
    "blocks gathered (8.7 GiB)",
    "answer": _PER_LOGIT,
    "answer-7b-qlora-2048": "tensors and reserved memory differ less than predicted; 0.2 GiB more "
    "for 4 times the tokens",
    "answer-7b-lora-zero3-b6": "LoRA grows by 2.6 GiB per sequence, QLoRA by 1.6 GiB with the same "
    "activations: likely allocator overhead",
    "answer-7b-lora-offload": "one more fp32 copy of the logits is 2.4 GiB; the rest is not "
    "explained",
    "answer-70b": "one more fp32 copy of the logits is 0.5 GiB; the rest is not explained",
    "peft-70b-lora-z3": "read from a monitor (80 %); one more copy of the logits is 2.1 GB; the "
    "rest is DeepSpeed's buffers or not explained",
    "peft-70b-lora-fsdp": "weights are loaded and sharded in fp32 (17 GB more); 72 to 80 GB "
    "published",
    "peft-70b-qlora-fsdp-offload": "not explained; answer-70b-qlora-offload-b2, nearly the same "
    "run, took 14.9 GiB (16.0 GB)",
    "longlora": "kind not stated, 0.8 GB above the device memory; one more copy of the logits is "
    "1.0 GB",
    "automodel": "kernels of Transformer Engine and Triton, predicted without; rank, targets and "
    "recompute not stated",
}


class Row(NamedTuple):
    """One published memory figure and its prediction, in the published unit."""

    id: str
    source: str
    command: str
    kind: str
    unit: str
    measured: float
    predicted: float | None
    # Predicted memory of the device, with what lies outside the allocator.
    device: tuple[float, float] | None
    # Why there is no prediction, or why the error is above 10 %.
    why: str

    @property
    def error(self) -> float | None:
        return None if self.predicted is None else self.predicted / self.measured - 1


# ---- memory ---------------------------------------------------------------------------------


def read_figures(traced: bool = True) -> list[Row]:
    """All rows of the table, predicted where the source states enough.

    Without `traced`, those are left out whose model is traced, which takes minutes: with parts
    trained in full, or without formulas.
    """
    with FIGURES.open(encoding="utf-8") as file:
        return [_row(row) for row in csv.DictReader(file) if traced or not _is_traced(row)]


def _is_traced(row: dict[str, str]) -> bool:
    return bool(row["train"]) or bool(row["options"] and kept_trace.named(row["model"]))


def _row(row: dict[str, str]) -> Row:
    predicted, device, why = None, None, row["not_predicted"]
    if not why:
        try:
            profile, unit = estimate(row), UNITS[row["unit"]]
            predicted = _bytes(profile, row["kind"]) / unit
            if (occupied := profile.known_memory.occupied_bytes) is not None:
                device = occupied[0] / unit, occupied[1] / unit
        except SpecError as problem:
            why = str(problem).splitlines()[0]
    found = Row(
        row["id"], row["source"], command(row), row["kind"], row["unit"], float(row["figure"]),
        predicted, device, why,
    )  # fmt: skip
    if found.error is not None and abs(found.error) > NEAR:
        return found._replace(why=reason(found.id))
    return found


def command(row: dict[str, str]) -> str:
    """The equivalent command; parts that are trained in full are set in a run.toml."""
    if row["not_predicted"]:
        return ""
    words = f"shardwise estimate --model {row['model']} --cluster {row['cluster']} {row['options']}"
    return words + (f" # and adapter.train = {row['train'].split()}" if row["train"] else "")


def estimate(row: dict[str, str]) -> StepProfile:
    settings: dict[str, Any] = {}
    words = iter(shlex.split(row["options"]))
    for word in words:
        name = word.removeprefix("--").replace("-", "_")
        if name in ("compile", "offload"):
            settings[name] = True
        else:
            value = next(words)
            settings[name] = int(value) if value.isdigit() else value
    if row["train"]:
        fields = parse_adapter(settings["adapter"]) | {"train": tuple(row["train"].split())}
        settings["adapter"] = Adapter.read(fields)
    model = str(HERE.parent / row["model"]) if "/" in row["model"] else row["model"]
    return shardwise.estimate(model, row["cluster"], settings.pop("strategy", None), **settings)


def _bytes(profile: StepProfile, kind: str) -> float:
    """Bytes of the published kind: the middle of an interval where we predict one."""
    memory = profile.known_memory
    interval = {"reserved": memory.peak_reserved_bytes, "device": memory.occupied_bytes}.get(kind)
    return sum(interval) / 2 if interval else float(memory.peak_allocated_bytes)


def reason(name: str) -> str:
    """The reason with the longest matching key."""
    keys = [key for key in REASONS if re.match(key, name)]
    return REASONS[max(keys, key=len)] if keys else ""


# ---- time -----------------------------------------------------------------------------------


class Run(NamedTuple):
    """A published fine-tuning run: seconds per step where Shardwise predicts its layout."""

    file: str
    kind: str
    model: str
    layout: str
    measured_s: float | None
    predicted_s: float | None
    why: str

    @property
    def error(self) -> float | None:
        if self.predicted_s is None or self.measured_s is None:
            return None
        return self.predicted_s / self.measured_s - 1


PRESETS = {"Llama3 8B": "llama-3-8b", "Qwen2.5 7B": "qwen2.5-7b"}


def read_runs() -> Iterator[Run]:
    """LoRA and SFT rows of benchmarks/data/multidim."""
    for name in ("automodel", "megatron_bridge", "nemo", "torch_native_multidim"):
        with (FOLDER / "multidim" / f"{name}.csv").open(encoding="utf-8") as file:
            for row in csv.DictReader(file):
                low = {key.lower(): value or "" for key, value in row.items()}
                kind = "LoRA" if "lora" in low.get("kind", "").lower() or low.get("lora") else "SFT"
                if kind == "LoRA" or "sft" in low.get("kind", "").lower():
                    yield _run(name, kind, low)


def _run(file: str, kind: str, row: dict[str, str]) -> Run:
    sizes = {
        name: int(row[name]) for name in ("tp", "pp", "cp", "ep") if row.get(name, "").isdigit()
    }
    split = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    gpus = row.get("gpus") or row["#gpus"]
    precision = row.get("precision") or "bf16"
    layout = ", ".join([f"{gpus} GPU" + ("s" if gpus != "1" else ""), *split, precision.lower()])
    seconds = row.get("time per global step (s)") or row.get("step_time_s")
    measured = float(seconds) if seconds else None
    names = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
    missing = [names[name] for name, size in sizes.items() if size > 1]
    why, predicted = "", None
    if missing:
        why = f"not predicted yet: {' and '.join(missing)} parallelism"
    elif precision.lower() != "bf16":
        why = f"not predicted yet: {precision.lower()}"
    else:
        # Rank, targets and recompute are not published: all linear layers, no recompute.
        profile = shardwise.estimate(
            PRESETS[row["model"]], f"{gpus}xH100-SXM", adapter="lora:16",
            seq_len=int(row["seq length"]), micro_batch=int(row["mbs"]),
            accumulate=int(row["ga"]), recompute="none",
        )  # fmt: skip
        assert profile.time is not None
        predicted = profile.time.step_s
    run = Run(file, kind, row["model"], layout, measured, predicted, why)
    if run.error is not None and abs(run.error) > NEAR:
        return run._replace(why=reason(f"{file}-{row['model']}"))
    return run


# ---- report ---------------------------------------------------------------------------------


def summary(errors: list[float]) -> dict[str, float]:
    size = [abs(error) for error in errors]
    return {
        "rows": len(size),
        "within_10_percent": sum(error <= NEAR for error in size),
        "median_error": statistics.median(size),
        "max_error": max(size),
        "bias": statistics.median(errors),
    }


def study(traced: bool = True) -> dict[str, Any]:
    figures, runs = read_figures(traced), list(read_runs())
    judged = [row for row in figures if row.error is not None]

    def errors(rows: list[Row]) -> list[float]:
        return [row.error for row in rows if row.error is not None]

    sources = dict.fromkeys(row.source for row in judged)
    return {
        "memory": summary(errors(judged)),
        "kinds": {
            kind: summary(errors([row for row in judged if row.kind == kind]))
            for kind in sorted({row.kind for row in judged})
        },
        "sources": {
            name: summary(errors([row for row in judged if row.source == name])) for name in sources
        },
        "figures": [row._asdict() | {"error": row.error} for row in figures],
        "runs": [run._asdict() | {"error": run.error} for run in runs],
    }


def _table(head: str, rows: list[str]) -> list[str]:
    return [head, "|" + "---|" * (head.count("|") - 1), *rows, ""]


def section(result: dict[str, Any]) -> list[str]:
    """The lines of the section "Adapters" of docs/accuracy-tables.md."""
    figures, runs = result["figures"], result["runs"]
    judged = [row for row in figures if row["error"] is not None]

    def line(name: str, r: dict[str, Any]) -> str:
        return (
            f"| {name} | {r['rows']} | {r['within_10_percent']} | {r['median_error']:.1%} "
            f"| {r['max_error']:.1%} | {r['bias']:+z.1%} |"
        )

    return [
        "## Adapters",
        "",
        *TEXT,
        *_table(
            "| error of memory | figures | within 10 % | median | largest | bias |",
            [
                line("**all**", result["memory"]),
                *(line(kind, group) for kind, group in result["kinds"].items()),
                *(line(name, group) for name, group in result["sources"].items()),
            ],
        ),
        "### Memory of adapters, figure by figure",
        "",
        *_table(
            "| figure | kind | measured | predicted | error | device memory | why |",
            [
                f"| {r['id']} | {r['kind']} | {r['measured']:.1f} {r['unit']} "
                f"| {r['predicted']:.1f} | {r['error']:+z.0%} "
                f"| {r['device'][0]:.1f} to {r['device'][1]:.1f} | {r['why']} |"
                for r in judged
            ],
        ),
        "Not predicted:",
        "",
        *_table(
            "| source | figures | why |",
            [
                f"| {source} | {count} | {why} |"
                for (source, why), count in Counter(
                    (r["source"], r["why"]) for r in figures if r["error"] is None
                ).items()
            ],
        ),
        *_time(runs),
    ]


def _time(runs: list[dict[str, Any]]) -> list[str]:
    head = ["### Step time of published fine-tuning", ""]
    groups = Counter(
        (r["file"], r["kind"], r["model"], r["layout"], r["measured_s"], r["predicted_s"], r["why"])
        for r in runs if r["error"] is not None
    )  # fmt: skip
    others = Counter(
        (r["file"], r["kind"], r["model"], r["layout"], r["why"])
        for r in runs if r["error"] is None
    )  # fmt: skip
    return [
        *head,
        TIME,
        "",
        *_table(
            "| table | kind | model | layout | rows | measured s | predicted | error | why |",
            [
                *(
                    f"| {f} | {k} | {m} | {lay} | {n} | {got:.2f} | {p:.2f} | {p / got - 1:+z.0%} "
                    f"| {why} |"
                    for (f, k, m, lay, got, p, why), n in groups.items()
                ),
                *(
                    f"| {f} | {k} | {m} | {lay} | {n} | | | | {why} |"
                    for (f, k, m, lay, why), n in others.items()
                ),
            ],
        ),
    ]


TEXT = [
    "Published memory of LoRA and QLoRA runs of dense models of 7B to 72B and of mixtures against "
    "`shardwise estimate` with the same settings. `python -m benchmarks.adapters` prints this "
    "section; `--json` adds the command of each figure. Sources, commits and settings: "
    "benchmarks/published_adapters.csv.",
    "",
    "Allocated memory is compared with the peak of tensors, reserved memory and memory of the "
    "device with the middle of their predicted intervals. Where a source does not say which it "
    "reports, its figure is compared with the peak of tensors. Figures of several GPUs together "
    "are divided by their number.",
    "",
    "Nothing was fitted to these figures. Settings and the rule of comparison were written down "
    "and committed before the first look; sequence lengths, ranks and layers that a source does "
    "not state were read in its scripts, and assumed for the recipes of the torchtune README. "
    "There were three looks: one at all figures but the twelve "
    "with trained embeddings, whose model could not be read yet, one with those, and one at "
    "mixtures, when experts could be stored in 4 bits. Reasons were "
    "found after the look: those that name bytes were computed from the figures, the others are "
    "likely ones. No prediction was changed. The card A6000 is not in the catalogue; L40S, of the "
    "same memory, stands for it.",
    "",
]
TIME = (
    "LoRA and SFT rows of benchmarks/data/multidim, each listed. Adapters are not "
    "predicted with tensor, pipeline, context or expert parallelism yet, nor with fp8."
)


def write(lines: list[str]) -> None:
    """Replace the section in the page."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition("## Adapters\n")
    after = rest.partition("## Left out\n")[2]
    if not rest:
        before, _, after = before.partition("## Left out\n")
    PAGE.write_text(before + "\n".join(lines) + "\n## Left out\n" + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true", help="update docs/accuracy-tables.md")
    options = parser.parse_args()
    result = study()
    if options.write:
        write(section(result))
    print(json.dumps(result, indent=2) if options.json else "\n".join(section(result)))


if __name__ == "__main__":
    main()
