"""Published training runs as inputs of the predictor: units, strategy, hardware, tokens per second.

The runs are read from ../shared/validation, outside the project.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from shardwise.predict.configurations import Configurations
from shardwise.predict.program.events import Program, join, structure
from shardwise.predict.program.prices import Prices
from shardwise.predict.program.step import step_program
from shardwise.predict.rates import Coefficients, Hardware
from shardwise.predict.time import schedule
from shardwise.predict.work import predict_work
from shardwise.spec import ModelSpec, Strategy
from shardwise.spec.catalogue import find_device
from shardwise.units.decoder import decoder_units
from shardwise.units.unit import ModelUnits

FOLDER = Path(__file__).resolve().parents[2] / "shared" / "validation"
# Device names of the table, mapped to those of the catalogue.
DEVICES = {
    "A100": "A100-80GB",
    "A100-40GB": "A100-40GB",
    "A100-40GB-SXM": "A100-40GB",
    "A100-80GB": "A100-80GB",
    "A100-80GB-SXM": "A100-80GB",
    "A100-80GB-SXM-400W": "A100-80GB",
    "H100": "H100-SXM",
    "H100-80GB": "H100-SXM",
    "H100-80GB-SXM": "H100-SXM",
    "H100-96GB-HBM2e-500W": "H100-96GB-500W",
    "H200-141GB-SXM": "H200-SXM",
}
RECOMPUTE: dict[str, Any] = {
    "": "none",
    "none": "none",
    "full": "full",
    "selective": 0.5,  # every n-th block, n not published
    "selective-2": 0.5,
    "selective-op": "selective",
}
# Usual network bandwidth per device in bytes/s, for sources that name no network.
USUAL_NETWORK = {"A100": 25e9, "H100": 50e9}


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One published run."""

    id: str
    source: str
    split: str
    family: str
    gpu: str
    devices: int
    units: ModelUnits
    strategy: Strategy
    columns: Configurations
    hardware: Hardware
    tokens_per_s: float  # per device

    @property
    def tokens(self) -> int:
        return self.strategy.micro_batch * self.strategy.accumulate * self.units.seq_len


def read_rows(splits: tuple[str, ...] = ("fit", "heldout")) -> tuple[list[Row], list[str]]:
    """Rows of these splits, and the reason for each row that cannot be described."""
    with (FOLDER / "measured_runs.csv").open(encoding="utf-8") as file:
        raw = [row for row in csv.DictReader(file) if row["split"] in splits]
    found, left_out = [], []
    for row in raw:
        if row["gpu"] not in DEVICES:
            left_out.append(f"{row['id']}: no coefficients for {row['gpu']}")
        elif not row["tokens_per_s_per_gpu"]:
            left_out.append(f"{row['id']}: no tokens per second")
        else:
            found.append(_read(row))
    return found, left_out


def _whole(text: str, otherwise: int = 0) -> int:
    return int(float(text)) if text else otherwise


def model_of(row: dict[str, str], **changes: Any) -> ModelSpec:
    width, heads = _whole(row["d_model"]), _whole(row["n_heads"])
    fields = {
        "family": "mpt" if row["mlp"] == "gelu" else "llama",
        "layers": _whole(row["n_layers"]),
        "hidden": width,
        "heads": heads,
        "kv_heads": _whole(row["n_kv_heads"], heads),
        "head_dim": width // heads,
        "ffn": _whole(row["d_ff"]),
        "vocab": _whole(row["vocab"]),
        "max_positions": _whole(row["seq_len"]),
        "tied": row["tied_embeddings"] == "true",
    }
    return ModelSpec.read({**fields, **changes})


def _read(row: dict[str, str]) -> Row:
    model = model_of(row)
    devices = _whole(row["gpus_total"])
    per_node = min(devices, _whole(row["gpus_per_node"], 8))
    strategy = strategy_of(row, devices, per_node)
    columns = Configurations.of([strategy])
    if row["allgather_dtype"] == "fp32":
        # Gathered in fp32, computed in bf16: only the traffic changes.
        columns.param_bytes = np.asarray([4])
    device = find_device(DEVICES[row["gpu"]])
    family = "A100" if "A100" in row["gpu"] else "H100"
    network = row["inter_node_gbps_per_gpu"]
    peak = device.peak_flops("bf16")
    assert peak is not None
    return Row(
        id=row["id"],
        source=row["source"],
        split=row["split"],
        family=family,
        gpu=device.name,
        devices=devices,
        units=decoder_units(
            model, _whole(row["seq_len"]), "bf16", compiled=row["torch_compile"] == "true"
        ),
        strategy=strategy,
        columns=columns,
        hardware=Hardware(
            peak_flops=peak,
            memory_bandwidth=device.memory_bandwidth,
            link_bandwidth=device.link_bandwidth,
            network_bandwidth=float(network) * 1e9 / 8 if network else USUAL_NETWORK[family],
            devices_per_node=per_node,
        ),
        tokens_per_s=float(row["tokens_per_s_per_gpu"]),
    )


def strategy_of(row: dict[str, str], devices: int, per_node: int, **changes: Any) -> Strategy:
    kind = "zero3" if row["strategy"] == "hybrid" else row["strategy"]
    fields: dict[str, Any] = {
        "kind": kind if devices > 1 else "single",
        "micro_batch": max(1, _whole(row["micro_batch"], 1)),
        "accumulate": max(1, _whole(row["grad_accum"], 1)),
        "recompute": RECOMPUTE[row["activation_ckpt"]],
    }
    group = _whole(row["shard_group_size"], per_node if row["strategy"] == "hybrid" else devices)
    if kind == "zero3" and 1 < group < devices:
        fields["shard"] = group
    if row["grad_sync"] in ("every-microbatch", "last-microbatch"):
        fields["grad_sync"] = row["grad_sync"].partition("-")[0]
    if row["reduce_dtype"] in ("bf16", "fp32"):
        fields["reduce_dtype"] = row["reduce_dtype"]
    return Strategy.read({**fields, **changes}).resolve(devices, per_node)


def predict(rows: list[Row], coefficients: dict[str, Coefficients]) -> np.ndarray[Any, Any]:
    """Tokens per second and device; rows whose steps have one structure are simulated together."""
    found = np.empty(len(rows))
    programs = [_program(row, coefficients[row.family]) for row in rows]
    alike: dict[object, list[int]] = {}
    for index, program in enumerate(programs):
        alike.setdefault(structure(program), []).append(index)
    for chosen in alike.values():
        together = join([programs[index] for index in chosen])
        contention = np.asarray([coefficients[rows[index].family].contention for index in chosen])
        tokens = np.asarray([rows[index].tokens for index in chosen])
        found[chosen] = tokens / schedule(together, len(chosen), contention).step_s
    return found


def _program(row: Row, k: Coefficients) -> Program:
    make = partial(Prices, hardware=row.hardware, k=k)
    return step_program(row.units, row.columns, make_prices=make)


def constant_efficiency(fit: list[Row], rows: list[Row]) -> np.ndarray[Any, Any]:
    """Baseline prediction: one constant share of the peak per device family."""

    def ideal(row: Row) -> float:
        work = predict_work(row.units, row.columns)
        return float(row.hardware.peak_flops * work.tokens[0] / work.hardware_flops[0])

    share = {
        family: float(np.median([r.tokens_per_s / ideal(r) for r in fit if r.family == family]))
        for family in {row.family for row in fit}
    }
    return np.asarray([share[row.family] * ideal(row) for row in rows])
