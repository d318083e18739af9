"""Published runs of 2024 to 2026 as inputs of the predictor, or why a run cannot be predicted.

What a source leaves to its stack is read from the stack's configuration: data/evidence.csv.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, get_args

from benchmarks.validation import FOLDER, Row, devices_per_node
from shardwise.predict.configurations import Configurations
from shardwise.predict.kernels import hardware_of
from shardwise.spec.adapter import Adapter
from shardwise.spec.catalogue import find_device
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.dtype import LinearDType
from shardwise.spec.lookup import find_model
from shardwise.spec.model import ModelSpec
from shardwise.spec.question import describe_run
from shardwise.spec.record import SpecError
from shardwise.spec.software import Software, find_software
from shardwise.spec.strategy import Strategy
from shardwise.units.load import load_units
from shardwise.units.unit import ModelUnits

# Devices of the table, by how their names begin.
DEVICES = {
    "H100": "H100-SXM",
    "NVIDIA H100": "H100-SXM",
    "H200": "H200-SXM",
    "NVIDIA H200-SXM": "H200-SXM",
    "B200": "B200",
    "NVIDIA Blackwell GPU (B200": "B200",
    "GB200": "GB200",
    "NVIDIA Blackwell GPU (GB200": "GB200",
    "NVIDIA Blackwell Ultra GPU (GB300": "GB300",
    "A6000": "RTX-A6000",
    "AMD Instinct MI300X": "MI300X",
    "AMD Instinct MI325X": "MI325X",
}
# Presets by the names of the table, without what follows in brackets.
PRESETS = {
    "Qwen3-0.6B": "qwen3-0.6b",
    "Qwen3-4B-Instruct-2507": "qwen3-4b",
    "Qwen3-30B-A3B-Instruct-2507": "qwen3-30b-a3b",
    "Qwen3-235B-A22B-Instruct-2507": "qwen3-235b-a22b",
    "llama-2-70b": "llama-2-70b",
    "llama-3-8b": "llama-3-8b",
    "llama-3-70b": "llama-3-70b",
    "llama-3.1-8b": "llama-3.1-8b",
    "qwen3-8b": "qwen3-8b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
}
# Its MLP has two matrices of 24,576; three of two thirds of that are as many parameters and FLOPs.
NEMOTRON_15B = {
    "family": "llama",
    "layers": 32,
    "hidden": 6144,
    "heads": 48,
    "kv_heads": 8,
    "head_dim": 128,
    "ffn": 16384,
    "vocab": 256000,
    "max_positions": 4096,
    "tied": False,
}
PRECISIONS = ("bf16", *get_args(LinearDType))
# MLPerf's reference adapts attention alone (--lora_target_modules "qkv_proj,o_proj").
MLPERF_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
# GB/s of the network per device where the source names none.
NETWORK = "400Gbps"
# Rows that do not measure training as their settings say, and why.
MARKED = {
    **dict.fromkeys(("prm-024", "prm-025"), "weights are gathered and saved inside the timing"),
    **dict.fromkeys(
        ("prm-021", "prm-022", "prm-028", "prm-031"),
        "B200 software of that week: 3.63 s a week later instead of 14.14 s",
    ),
    "prm-014": "53 % slower than full training at 16k, equal to it at 64k",
}


class Left(NamedTuple):
    """A row that is not predicted."""

    id: str
    why: str


def read_2026(splits: Iterable[str] = ("fit",)) -> tuple[list[Row], list[Left]]:
    """Rows of these splits, and those that cannot be expressed."""
    found: list[Row] = []
    left: list[Left] = []
    for raw in _table():
        if raw["split"] not in splits:
            continue
        why = _why_not(raw)
        if why:
            left.append(Left(raw["id"], why))
            continue
        try:
            found.append(read_row(raw))
        except SpecError as error:
            left.append(Left(raw["id"], str(error)))
    return found, left


def is_recent(row: Row) -> bool:
    """Whether a row is one of this table."""
    return any(raw["id"] == row.id for raw in _table())


@cache
def _table() -> list[dict[str, str]]:
    path = FOLDER / "multidim" / "published_2026.csv"
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def published(name: str) -> dict[str, str]:
    """A row of the table by its id."""
    return next(raw for raw in _table() if raw["id"] == name)


def _degree(raw: dict[str, str], axis: str) -> int:
    return int(raw[axis]) if raw[axis].isdigit() else 1


def _name(raw: dict[str, str]) -> str:
    return raw["model"].partition(" (")[0]


def _kind(raw: dict[str, str]) -> str:
    """What stands in brackets after the model: an adapter, or reinforcement learning."""
    return raw["model"].partition(" (")[2].rstrip(")")


def is_reinforcement(raw: dict[str, str]) -> bool:
    return _kind(raw).startswith("RL")


def _why_not(raw: dict[str, str]) -> str:
    """Why a row cannot be expressed; empty where it can."""
    if raw["id"] in MARKED:
        return f"marked: {MARKED[raw['id']]}"
    stated = raw["tokens_per_s_per_gpu"] and raw["gpus"] and raw["seq"]
    divided = _degree(raw, "tp") * _degree(raw, "cp") > 1
    reasons = {
        "throughput, devices or sequence not stated": not stated,
        "pipeline parallelism": _degree(raw, "pp") > 1,
        "expert parallelism": _degree(raw, "ep") > 1,
        f"precision {raw['precision'] or 'not stated'}": raw["precision"] not in PRECISIONS,
        f"model {_name(raw)}": _name(raw) not in PRESETS and _name(raw) != "nemotron4-15b",
        f"device {raw['gpu']}": _device(raw) is None,
        "adapters with tensor or context parallelism": "LoRA" in _kind(raw) and divided,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _device(raw: dict[str, str]) -> str | None:
    starts = sorted(DEVICES, key=len, reverse=True)
    return next((DEVICES[start] for start in starts if raw["gpu"].startswith(start)), None)


def stack_of(raw: dict[str, str]) -> str:
    if raw["source"].startswith("prime-rl"):
        return "prime-rl"
    if raw["stack"] == "MaxText":
        return "maxtext"
    if raw["framework"].startswith("torchtitan"):
        return "torchtitan"
    if raw["framework"].startswith("PithTrain"):
        return "pith-train"
    return "megatron"


def _cluster(raw: dict[str, str]) -> ClusterSpec:
    name = _device(raw)
    assert name is not None
    device, count = find_device(name), int(raw["gpus"])
    per_node = devices_per_node(name, count, int(raw["gpus_per_node"] or 8))
    several = count > per_node
    return ClusterSpec(
        device=device,
        nodes=count // per_node,
        devices_per_node=per_node,
        **({"network": NETWORK} if several else {}),  # type: ignore[arg-type]
    )


def _model(raw: dict[str, str]) -> ModelSpec:
    if _name(raw) == "nemotron4-15b":
        return ModelSpec.read(NEMOTRON_15B)
    found = find_model(PRESETS[_name(raw)])
    assert isinstance(found, ModelSpec)
    return found.but(max_positions=max(found.max_positions, int(raw["seq"])))


def _settings(raw: dict[str, str]) -> dict[str, Any]:
    """The strategy, and what is trained."""
    stack, lora = stack_of(raw), "LoRA" in _kind(raw)
    strategy: dict[str, Any] = {"kind": "zero3", "micro_batch": int(raw["mbs"] or 1)}
    found: dict[str, Any] = {}
    if stack == "prime-rl":
        strategy |= {"recompute": "full", "compile": True, "accumulate": 2}
        if is_reinforcement(raw):
            # The head runs over parts of the vocabulary.
            strategy |= {"loss": "chunked", "loss_chunks": 74}
        if lora:
            found["adapter"] = Adapter.read({"rank": 16, "base": "fp32"})
    elif stack == "maxtext":
        strategy |= {"recompute": "full", "compile": True}
        if raw["shard_group"] and int(raw["shard_group"]) < int(raw["gpus"]):
            strategy["shard"] = int(raw["shard_group"])
    elif stack == "torchtitan":
        strategy |= {"compile": True, "recompute": "selective"}
        strategy |= {"loss": "chunked", "loss_chunks": 8}
    else:
        # Megatron's distributed optimizer.
        strategy |= {"kind": "zero1" if not lora else "ddp"}
        strategy |= {"tensor": _degree(raw, "tp"), "context": _degree(raw, "cp")}
        replicas = int(raw["gpus"]) // _degree(raw, "tp") // _degree(raw, "cp")
        strategy["accumulate"] = int(raw["gbs"]) // replicas // strategy["micro_batch"]
        if lora:
            found["adapter"] = Adapter.read(
                {"rank": 16, "targets": MLPERF_TARGETS, "base": _base(raw)}
            )
    if raw["precision"] != "bf16":
        strategy["linear_dtype"] = raw["precision"]
    return {"strategy": Strategy.read(strategy), **found}


def _base(raw: dict[str, str]) -> str:
    """How frozen weights are stored: NeMo's submissions set `fp8_params` with FP8=True."""
    blackwell = (_device(raw) or "").startswith(("B", "GB"))
    return "fp8" if raw["precision"] == "fp8" and blackwell else "bf16"


def read_row(raw: dict[str, str], **changes: Any) -> Row:
    """A row as an input of the predictor; `changes` are made to its strategy."""
    seq_len = int(raw["seq"])
    settings = _settings(raw)
    settings["strategy"] = settings["strategy"].but(**changes)
    run = describe_run(_model(raw), _cluster(raw), seq_len=seq_len, **settings)
    units = load_units(run.model, seq_len, run.strategy).grouped(run.strategy.blocks_per_unit)
    if stack_of(raw) == "maxtext":
        units = _kept_products(units, _MAXTEXT_KEEPS[raw["source"].split()[4].rstrip(",")])
    if is_reinforcement(raw):
        units = _head_again(units)
    hardware = hardware_of(run.cluster, run.strategy.param_dtype)
    assert hardware is not None
    return Row(
        id=raw["id"],
        source=raw["source"],
        split=raw["split"],
        device=run.cluster.device,
        software=_software(raw),
        devices=run.cluster.devices,
        units=units,
        strategy=run.strategy,
        columns=Configurations.of([run.strategy]),
        hardware=hardware,
        tokens_per_s=float(raw["tokens_per_s_per_gpu"]),
        regime=_regime(raw),
    )


def _regime(raw: dict[str, str]) -> str:
    if is_reinforcement(raw):
        return "RL"
    if "A3B" in raw["model"].upper() or "A22B" in raw["model"].upper():
        return "experts"
    if "LoRA" in _kind(raw):
        return "adapters"
    return "dense" if raw["precision"] == "bf16" else "low-bit"


def _software(raw: dict[str, str]) -> Software:
    name = stack_of(raw)
    if name == "prime-rl" and not is_reinforcement(raw):
        name = "prime-rl-sft"
    found = find_software(name)
    if raw["attention"]:
        # The table says it of each row.
        found = found.but(attention=dict.fromkeys(found.attention, raw["attention"]))
    return found


# Products that MaxText keeps under its full recompute, by release of the recipes.
_MAXTEXT_KEEPS = {
    "v25.01": ("attention.q", "attention.k", "attention.v", "attention.out"),
    "v25.02": ("attention.q", "attention.k", "attention.v"),
}


def _kept_products(units: ModelUnits, names: tuple[str, ...]) -> ModelUnits:
    """The same model whose full recompute does not run these products again."""
    made: dict[int, Any] = {}
    for block in {id(block): block for block in units.blocks}.values():
        spared = sum(
            2.0 * parameter.numel
            for parameter in block.parameters
            if parameter.name.removesuffix(".weight") in names
        )
        kept = dict(block.stage.kept)
        again = kept["full"].recomputed_matmul_flops - spared
        kept["full"] = kept["full"]._replace(recomputed_matmul_flops=again)
        made[id(block)] = replace(block, stage=replace(block.stage, kept=kept))
    return replace(units, blocks=tuple(made[id(block)] for block in units.blocks))


def _head_again(units: ModelUnits) -> ModelUnits:
    """prime-rl's head over parts of the vocabulary: its backward makes the logits again, and the
    gradient of its weights even where they are frozen.
    """
    stage = replace(units.root.stage, gradient_flops=3.0 * units.root.stage.matmul_flops)
    return replace(units, root=replace(units.root, stage=stage))
