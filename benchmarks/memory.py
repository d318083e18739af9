"""Predicted against published peak memory, and verdicts on runs that fit and that did not.

`STACKS` has what the table's columns do not say about a stack: facts from the stack's own code, not
numbers fitted to its rows.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.validation import DEVICES, FOLDER, model_of, strategy_of
from shardwise.predict.configurations import Configurations
from shardwise.predict.estimate import needed_bytes, reserved_interval, verdict
from shardwise.predict.memory import Memory, predict_memory
from shardwise.spec.catalogue import find_device
from shardwise.spec.cluster import DeviceSpec
from shardwise.step.profile import Verdict
from shardwise.units.decoder import decoder_units
from shardwise.units.stage import Moment
from shardwise.units.unit import ModelUnits, Unit

GIB = 2**30
# Devices with published memory whose time is not predicted.
ALSO = {"A800-80GB": "A800-80GB", "MI300X": "MI300X", "B200-power-limited": "B200"}


@dataclass(frozen=True, kw_only=True)
class Stack:
    """Behaviour of a training stack that its rows do not state."""

    # RMSNorm as one kernel that keeps its input and nothing in fp32.
    fused_norm: bool = False
    # Bytes per logit at the loss; None is a loss in fp32 without fusion (12).
    logit_bytes: int | None = None
    # The embedding is a separate unit, not part of the root.
    embedding_apart: bool = False
    # Parameters are gathered in fp32 and computed under autocast.
    autocast: bool = False
    # Gradients are accumulated in fp32 copies, even with one micro-batch.
    always_sums: bool = False
    because: str = ""


STACKS: dict[str, Stack] = {
    "pytorch/torchtitan PR #165": Stack(
        fused_norm=True, because="train_configs/llama_7b.toml of March 2024: fused_rmsnorm"
    ),
    "pytorch/ao e2e training benchmarks MI300X": Stack(
        logit_bytes=4,
        embedding_apart=True,
        because="measured in August 2025 (pytorch/ao PRs 2736, 2777): torchtitan had a compiled "
        "loss (PR 1033, April) and separate units for embedding and head (PR 1094, July)",
    ),
    "mosaicml/llm-foundry": Stack(
        logit_bytes=4, because="llmfoundry/models/mpt: loss_fn defaults to fused_crossentropy"
    ),
    "Dao-AILab/flash-attention": Stack(
        logit_bytes=4, because="notes of its rows: fused MLP, layer norm and cross-entropy"
    ),
    "InternLM/InternEvo": Stack(
        logit_bytes=4, because="FlashGPTLMLoss is a fused cross-entropy, in place"
    ),
    "KempnerInstitute/KempnerForge": Stack(
        logit_bytes=8,
        because="scripts/train.py: cross-entropy of bf16 logits, which stay referenced",
    ),
    "intelligent-machine-learning/dlrover": Stack(
        autocast=True, because="fsdp_llama2_entry.sh: --precision bf16_amp"
    ),
    "HF Ultra-Scale Playbook": Stack(
        always_sums=True, because="ACCUMULATE_GRAD_IN_FP32=True in the notes of its rows"
    ),
}
STACKS["pytorch/ao e2e training benchmarks B200"] = STACKS[
    "pytorch/ao e2e training benchmarks MI300X"
]


def stack_of(row: dict[str, str]) -> Stack:
    named = f"{row['source']} {row['gpu']}"
    return next((stack for key, stack in STACKS.items() if named.startswith(key)), Stack())


@dataclass(frozen=True, kw_only=True, eq=False)
class Run:
    """One published configuration, with its predicted and measured memory."""

    id: str
    source: str
    # The configuration in the table's columns, to match runs with failures.
    key: tuple[str, ...]
    split: str
    kind: str
    measured: float  # GiB, 0 if not published
    ran: bool
    # In no held-out split, neither for time nor for memory.
    only_fitted: bool
    device: DeviceSpec
    memory: Memory

    @property
    def peak(self) -> int:
        return round(float(self.memory.peak_bytes[0]))

    @property
    def pooled(self) -> int:
        return round(float(self.memory.pooled_bytes[0]))

    @property
    def needed(self) -> int:
        return needed_bytes(self.peak, self.device, self.pooled)

    @property
    def predicted(self) -> float:
        """GiB of the measured kind: tensors, or the middle of the reserved interval."""
        if self.kind != "reserved":
            return self.peak / GIB
        low, high = reserved_interval(self.peak, self.device, self.pooled)
        return (low + high) / 2 / GIB

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def verdict(self) -> Verdict:
        return verdict(self.peak, self.device, self.pooled)


def units_of(row: dict[str, str], stack: Stack, autocast: bool) -> ModelUnits:
    changes = {"norm": "layernorm", "norm_parameters": "weight"} if stack.fused_norm else {}
    units = decoder_units(
        model_of(row, **changes),
        int(float(row["seq_len"])),
        "bf16",
        compiled=row["torch_compile"] == "true",
        autocast=autocast,
    )
    if stack.logit_bytes is not None:
        units = _with_loss(units, stack.logit_bytes * float(row["vocab"]))
    return _with_embedding_apart(units) if stack.embedding_apart else units


def _with_loss(units: ModelUnits, most: float) -> ModelUnits:
    """Limit the logits at every moment of the loss to `most` bytes per token."""

    def limited(moment: Moment) -> Moment:
        return moment._replace(logit_bytes=min(moment.logit_bytes, most))

    stage = units.root.stage
    stage = replace(
        stage,
        forward=tuple(limited(moment) for moment in stage.forward),
        backward=tuple(limited(moment) for moment in stage.backward),
    )
    return replace(units, root=replace(units.root, stage=stage))


def _with_embedding_apart(units: ModelUnits) -> ModelUnits:
    tables = tuple(p for p in units.root.parameters if not p.after_blocks)
    head = tuple(p for p in units.root.parameters if p.after_blocks)
    return replace(
        units,
        root=replace(units.root, parameters=head),
        blocks=(Unit(name="embedding", parameters=tables), *units.blocks),
        embedding_gradient_elements=0.0,
    )


def _predict(row: dict[str, str], stack: Stack) -> Memory:
    devices = int(float(row["gpus_total"]))
    changes: dict[str, Any] = {}
    if stack.always_sums:
        changes["accumulate"] = max(2, int(float(row["grad_accum"] or 1)))
    strategy = strategy_of(row, devices, min(devices, 8), **changes)
    columns = Configurations.of([strategy])
    if row["allgather_dtype"] == "fp32" or stack.autocast:
        columns.param_bytes = np.asarray([4])
    units = units_of(row, stack, autocast=strategy.autocast or stack.autocast)
    return predict_memory(units, columns)


def _described(row: dict[str, str]) -> bool:
    """Whether the columns determine memory: device, batch, recompute and vocabulary are known."""
    known = row["gpu"] in DEVICES or row["gpu"] in ALSO
    return bool(known and row["micro_batch"] and row["activation_ckpt"] and row["vocab"])


def _rows(name: str) -> Iterator[dict[str, str]]:
    with (FOLDER / name).open(encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _device(name: str) -> DeviceSpec:
    return find_device(DEVICES.get(name) or ALSO[name])


KEY = ("n_layers", "d_model", "seq_len", "gpus_total", "strategy", "micro_batch", "grad_accum")


def _run(row: dict[str, str], ran: bool, stack: Stack | None = None) -> Run:
    judged = row["mem_split"] in ("fit", "heldout")
    return Run(
        id=row["id"],
        source=row["source"],
        key=(row["source"], *(row[name] for name in KEY)),
        split=row["mem_split"] if judged else "",
        kind=row["mem_kind"] if judged else "",
        measured=float(row["peak_mem_gib"]) if judged else 0.0,
        ran=ran,
        only_fitted="heldout" not in (row["split"], row["mem_split"]),
        device=_device(row["gpu"]),
        memory=_predict(row, stack or stack_of(row)),
    )


def read_runs(stack: Stack | None = None) -> tuple[list[Run], list[str]]:
    """Runs of the splits whose memory can be described, and the ids of the others.

    With `stack`, every run is treated as a run of that stack instead of its own.
    """
    found, left_out = [], []
    for row in _rows("measured_runs.csv"):
        if not {row["split"], row["mem_split"]} & {"fit", "heldout"}:
            continue
        if _described(row):
            found.append(_run(row, ran=True, stack=stack))
        else:
            left_out.append(row["id"])
    return found, left_out


def read_failures() -> list[Run]:
    """Configurations published as having crashed or run out of memory."""
    found = []
    for number, row in enumerate(_rows("did_not_fit.csv")):
        stage = row["zero_stage"]
        full = {
            "id": f"failed-{number}",
            "source": "HF Ultra-Scale Playbook interactive benchmark chart (nanotron)",
            "strategy": "ddp" if stage == "0" else f"zero{stage}",
            "tied_embeddings": row["tied"],
            "activation_ckpt": "none",
            "master_dtype": "fp32",
            "reduce_dtype": "fp32",
            "grad_sync": "last-microbatch",
            "mlp": "swiglu",
        }
        blank = dict.fromkeys(
            (
                *("n_kv_heads", "torch_compile", "shard_group_size", "allgather_dtype"),
                *("split", "mem_split", "hfu_pct", "mfu_pct"),
            ),
            "",
        )
        found.append(_run({**blank, **row, **full}, ran=False))
    return found


# Known reasons for memory errors above 10 %, by prefix of the row's id.
REASONS = {
    "ttn-1065": "reserved memory is 1.36 times the active memory it reports; FSDP1",
    "ttn-1067": "reserved memory is 1.36 times the active memory it reports",
    "ttn-1069": "as ttn-1067, but compiled",
    "ttn-1071": "took 93 % of the device, where reserved memory cannot grow freely",
    "misc-108": "the same job took 39.1 GiB on MI300X four days earlier; no one description "
    "explains both",
    "misc-112": "13.4 GiB more on any number of devices: the size of a bf16 copy of all weights, "
    "which autocast over FSDP1 keeps",
    "kemp-1120": "one device, where this stack does not shard; not explained",
    "intern-10": "kind of memory and method of measurement not stated",
    "nano-09": "kind not stated; the missing part has the size of bf16 gradients next to fp32 sums",
}


def known_kind(run: Run) -> bool:
    return run.kind in ("allocated", "reserved")


# As for the other intervals: one run in ten may need more than the margin.
COVERED = 0.9


def calibration(runs: list[Run]) -> dict[str, float]:
    """The safety margin on needed memory, from fitted runs only, and how many of them it flags.

    Nine of ten measured runs stay within the factor: measured over needed (tensors and allocator
    overhead). Fragmentation needs no second factor: before it fails, the allocator frees unused
    blocks and retries. Runs under autocast over FSDP1 are left out, because the engine does not
    train like that.
    """
    fitted = [r for r in runs if r.split == "fit" and not r.source.startswith("intelligent-")]
    factor = np.quantile([run.measured / (run.needed / GIB) for run in fitted], COVERED)
    ran = [r for r in runs if r.only_fitted]
    return {
        "rows": len(fitted),
        "factor": float(factor),
        "ran": len(ran),
        "at_risk": sum(run.verdict == "at risk" for run in ran),
        "fullest": max(run.peak / run.device.capacity for run in ran),
    }


def study(columns_only: bool = True) -> dict[str, Any]:
    """Errors on held-out rows by kind and source, and verdicts on runs and failures.

    With `columns_only`, all runs are predicted once more, from what the table says alone.
    """
    runs, left_out = read_runs()
    failures = read_failures()
    held = [run for run in runs if run.split == "heldout"]
    known = [run for run in held if known_kind(run)]
    off = sorted(
        (run for run in runs if run.kind and abs(run.error) > 0.1), key=lambda r: -abs(r.error)
    )
    refused = [run for run in runs if run.verdict == "does not fit"]
    missed = [run for run in failures if run.verdict == "fits"]
    unseen = [run for run in runs if not run.only_fitted]
    also_ran = {run.key for run in runs}
    bare = read_runs(Stack())[0] if columns_only else []
    return {
        **_summary(known),
        "false_oom": len(refused),
        "ran": len(runs),
        "at_risk": sum(run.verdict == "at risk" for run in runs),
        "unseen": len(unseen),
        "unseen_at_risk": sum(run.verdict == "at risk" for run in unseen),
        "did_not_fit": len(failures),
        "did_not_fit_caught": 1 - len(missed) / len(failures),
        "missed": len(missed),
        "missed_that_also_ran": sum(run.key in also_ran for run in missed),
        "columns_only": _columns_only(bare) if bare else None,
        "by_ratio": {ratio: _by_ratio(known, ratio) for ratio in (1.0, 1.05, 1.1)},
        "calibration": calibration(runs),
        "fit": _summary([run for run in runs if run.split == "fit"]),
        "kinds": {k: _summary(g) for k, g in grouped(held, lambda run: run.kind).items()},
        "sources": {k: _summary(g) for k, g in grouped(held, lambda run: run.source).items()},
        "off": [
            {
                "id": run.id,
                "source": run.source,
                "split": run.split,
                "kind": run.kind,
                "measured": run.measured,
                "predicted": run.predicted,
                "error": run.error,
            }
            for run in off
        ],
        "refused": [run.id for run in refused],
        "left_out": left_out,
    }


def _columns_only(bare: list[Run]) -> dict[str, float]:
    return {
        **_summary([run for run in bare if run.split == "heldout" and known_kind(run)]),
        "false_oom": sum(run.verdict == "does not fit" for run in bare),
    }


def _by_ratio(runs: list[Run], ratio: float) -> float:
    """Median error if reserved memory were `ratio` times tensors plus allocator overhead."""
    found = [
        (run.peak + run.pooled) * ratio / GIB if run.kind == "reserved" else run.predicted
        for run in runs
    ]
    return float(np.median([abs(f / run.measured - 1) for f, run in zip(found, runs, strict=True)]))


def _summary(runs: list[Run]) -> dict[str, float]:
    size = np.abs([run.error for run in runs])
    return {
        "rows": len(runs),
        "median_error": float(np.median(size)),
        "mean_error": float(size.mean()),
        "p90_error": float(np.quantile(size, 0.9)),
        "bias": float(np.median([run.error for run in runs])),
    }


def grouped(runs: list[Run], key: Callable[[Run], str]) -> dict[str, list[Run]]:
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(key(run), []).append(run)
    return groups
