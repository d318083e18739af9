"""Published training runs as inputs of the predictor: units, strategy, hardware, tokens per second.

The runs are tables in benchmarks/data, which `benchmarks/tables.py` writes.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np

from shardwise.predict.configurations import Configurations
from shardwise.predict.program.events import (
    Cost,
    Event,
    Program,
    Repeat,
    Run,
    Wait,
    join_programs,
    structure_key,
)
from shardwise.predict.program.prices import Prices
from shardwise.predict.program.sizes import Sizes
from shardwise.predict.program.step import step_program
from shardwise.predict.rates import Bandwidths, Coefficients, Hardware
from shardwise.predict.time import schedule
from shardwise.predict.work import predict_work
from shardwise.spec.catalogue import find_device
from shardwise.spec.cluster import DeviceSpec
from shardwise.spec.dtype import LinearDType
from shardwise.spec.model import ModelSpec
from shardwise.spec.software import Architecture, Software, architecture, find_software
from shardwise.spec.strategy import Strategy
from shardwise.units.decoder import decoder_units
from shardwise.units.low_bits import in_low_bits
from shardwise.units.unit import ModelUnits

# Every table of measured runs is read from here.
FOLDER = Path(__file__).resolve().parent / "data"
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
# The same of devices without fitted runs in 16 bits.
OTHER_DEVICES = {"MI300X": "MI300X", "GB200": "GB200", "B200": "B200", "GB300": "GB300"}
RECOMPUTE: dict[str, Any] = {
    "": "none",
    "none": "none",
    "full": "full",
    "selective": 0.5,  # every n-th block, n not published
    "selective-2": 0.5,
    "selective-op": "selective",
}
# Gradients are reduced in their own dtype: internlm/solver/optimizer/hybrid_zero_optim.py of
# InternEvo puts the model's gradients, which are bf16, into its buckets.
REDUCE_DTYPES = {"InternLM/InternEvo": "bf16"}
# llm-foundry's submit_benchmarks.py trains with Composer's precision PURE: all in bf16.
ALL_BF16 = "mosaicml/llm-foundry benchmarking README 2023-04"
NVLINK_DOMAIN = 72
# Usual network bandwidth per device in bytes/s, for sources that name no network.
USUAL_NETWORK: dict[Architecture, float] = {
    "ampere": 25e9,
    "hopper": 50e9,
    **dict.fromkeys(("blackwell", "cdna"), 50e9),
}
# What the stack of a source called, by how its name begins; data/evidence.csv says where each was
# read. Others are taken for PyTorch's own attention of their time.
SOFTWARE = {
    "pytorch/torchtitan": "torchtitan-2024",
    "pytorch/ao e2e": "torchtitan-2024",
    "AWS ML blog: torchtitan": "torchtitan-2024",
    "mosaicml/llm-foundry": "llm-foundry",
    "InternLM/InternEvo": "internevo",
    "HF Ultra-Scale Playbook": "nanotron",
    "Dao-AILab/flash-attention training": "flash-attention-1",
    "intelligent-machine-learning/dlrover": "flash-attention-1",
    "KempnerInstitute/KempnerForge": "torch-2.13",
    "foundation-model-stack/fms-fsdp": "fms-fsdp",
    "PyTorch blog 2024-05-21 (IBM/Meta)": "fms-fsdp",
    "NVIDIA-NeMo/Megatron-Bridge": "megatron",
}
OTHER_SOFTWARE = "flash-attention-2"
# Of llm-foundry's large runs of 2024-01, only those of 13B and 30B still call its Triton kernel.
_LARGE_SCALE = "mosaicml/llm-foundry benchmarking README [H100 80GB BF16 (Large Scale"
_STILL_TRITON = (40, 48)


# The cluster whose collectives were measured: collective_bandwidth_h100.csv is of this source.
MEASURED_CLUSTER = "HF Ultra-Scale Playbook"


@cache
def measured_bandwidths() -> Bandwidths:
    with (FOLDER / "collective_bandwidth_h100.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))

    def column(name: str, factor: float = 1e9) -> tuple[float, ...]:
        return tuple(float(row[name]) * factor for row in rows)

    return Bandwidths(column("nodes", 1), column("allgather_GBps"), column("allreduce_GBps"))


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One published run."""

    id: str
    source: str
    split: str
    device: DeviceSpec
    software: Software
    devices: int
    units: ModelUnits
    strategy: Strategy
    columns: Configurations
    hardware: Hardware
    tokens_per_s: float  # per device
    # What tells runs apart whose errors differ: "dense", "RL", "experts" or "adapters".
    regime: str = "dense"

    @property
    def gpu(self) -> str:
        return self.device.name

    @property
    def kind(self) -> Architecture:
        return architecture(self.device)

    @property
    def nodes(self) -> int:
        return max(1, self.devices // self.hardware.devices_per_node)

    @property
    def compiled(self) -> bool:
        return self.units.blocks[0].stage.compiled

    @property
    def tokens(self) -> float:
        """Of a step, per device; the devices of a tensor or a context group share theirs."""
        of_group = self.strategy.micro_batch * self.strategy.accumulate * self.units.seq_len
        return of_group / self.strategy.mesh.inner


def read_compiled() -> list[Row]:
    """Compiled bf16 runs of the split `aux` whose devices and batch are stated."""
    stated = ("gpus_total", "micro_batch", "tokens_per_s_per_gpu")
    with (FOLDER / "measured_runs.csv").open(encoding="utf-8") as file:
        return [
            _read(row)
            for row in csv.DictReader(file)
            if row["split"] == "aux" and row["torch_compile"] == "true"
            if row["precision"].startswith("bf16") and row["gpu"] in DEVICES
            if all(row[name] for name in stated)
        ]


def read_low_bits() -> list[Row]:
    """Runs of the split `aux` whose products are in 8 bits, of stacks whose kernels are known, on
    devices at their full power.
    """
    stated = ("gpus_total", "micro_batch", "tokens_per_s_per_gpu")
    with (FOLDER / "measured_runs.csv").open(encoding="utf-8") as file:
        return [
            _read(row)
            for row in csv.DictReader(file)
            if row["split"] == "aux" and row["precision"] in get_args(LinearDType)
            if row["gpu"] in {**DEVICES, **OTHER_DEVICES} and all(row[name] for name in stated)
            if row["activation_ckpt"] in RECOMPUTE and row["source"].startswith(tuple(SOFTWARE))
        ]


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


def _software(row: dict[str, str]) -> Software:
    """The software whose kernels a run called."""
    source = row["source"]
    name = next((n for start, n in SOFTWARE.items() if source.startswith(start)), OTHER_SOFTWARE)
    found = find_software(name)
    large = source.startswith(_LARGE_SCALE) and _whole(row["n_layers"]) not in _STILL_TRITON
    return found.but(attention=find_software(OTHER_SOFTWARE).attention) if large else found


def devices_per_node(gpu: str, devices: int, stated: int) -> int:
    """Devices that NVLink joins: in a rack of GB200 or GB300, as many of 72 as divide the run."""
    if not gpu.startswith("GB"):
        return min(devices, stated)
    return max(size for size in range(1, NVLINK_DOMAIN + 1) if devices % size == 0)


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
    per_node = devices_per_node(row["gpu"], devices, _whole(row["gpus_per_node"], 8))
    low = row["precision"] if row["precision"] in get_args(LinearDType) else None
    strategy = strategy_of(row, devices, per_node, linear_dtype=low)
    columns = Configurations.of([strategy])
    if row["allgather_dtype"] == "fp32":
        # Gathered in fp32, computed in bf16: only the traffic changes.
        columns.param_bytes = np.asarray([4])
    device = find_device({**DEVICES, **OTHER_DEVICES}[row["gpu"]])
    network = row["inter_node_gbps_per_gpu"]
    peak = device.peak_flops("bf16")
    assert peak is not None
    return Row(
        id=row["id"],
        source=row["source"],
        split=row["split"],
        device=device,
        software=_software(row),
        devices=devices,
        units=_units(row, model, strategy),
        strategy=strategy,
        columns=columns,
        hardware=Hardware(
            peak_flops=peak,
            memory_bandwidth=device.memory_bandwidth,
            link_bandwidth=device.link_bandwidth,
            network_bandwidth=float(network) * 1e9 / 8
            if network
            else USUAL_NETWORK[architecture(device)],
            devices_per_node=per_node,
            measured=measured_bandwidths() if row["source"].startswith(MEASURED_CLUSTER) else None,
        ),
        tokens_per_s=float(row["tokens_per_s_per_gpu"]),
        regime="low-bit" if low else "dense",
    )


def _units(row: dict[str, str], model: ModelSpec, strategy: Strategy) -> ModelUnits:
    compiled = row["torch_compile"] == "true"
    units = decoder_units(model, _whole(row["seq_len"]), "bf16", compiled=compiled)
    low = strategy.linear_dtype
    return in_low_bits(units, low, gathered=strategy.low_bit_gather) if low else units


def strategy_of(row: dict[str, str], devices: int, per_node: int, **changes: Any) -> Strategy:
    kind = "zero3" if row["strategy"] == "hybrid" else row["strategy"]
    recompute = RECOMPUTE[row["activation_ckpt"]]
    if row["activation_ckpt"] == "selective" and row["hfu_pct"] and row["mfu_pct"]:
        # The share of recomputed blocks follows from the FLOPs: a full recompute adds a third.
        again = 3.0 * (float(row["hfu_pct"]) / float(row["mfu_pct"]) - 1.0)
        recompute = min(1.0, max(0.0, again))
    fields: dict[str, Any] = {
        "kind": kind if devices > 1 else "single",
        "micro_batch": max(1, _whole(row["micro_batch"], 1)),
        "accumulate": max(1, _whole(row["grad_accum"], 1)),
        "recompute": recompute,
    }
    if row["master_dtype"]:
        fields["master_dtype"] = row["master_dtype"]
    group = _whole(row["shard_group_size"], per_node if row["strategy"] == "hybrid" else devices)
    if kind.startswith("zero") and 1 < group < devices:
        fields["shard"] = group
    if row["grad_sync"] in ("every-microbatch", "last-microbatch"):
        fields["grad_sync"] = row["grad_sync"].partition("-")[0]
    stated = "bf16" if row["source"].startswith(ALL_BF16) else row["reduce_dtype"]
    reduce_dtype = stated or next(
        (dtype for source, dtype in REDUCE_DTYPES.items() if row["source"].startswith(source)), ""
    )
    if reduce_dtype in ("bf16", "fp32"):
        fields["reduce_dtype"] = reduce_dtype
    return Strategy.read({**fields, **changes}).resolve(devices, per_node)


def predict(rows: list[Row], of: Callable[[Row], Coefficients]) -> np.ndarray[Any, Any]:
    """Tokens per second and device; rows whose steps have one structure are simulated together."""
    found = np.empty(len(rows))
    for alike in _alike(tuple(rows)):
        k = Coefficients(*np.asarray([of(rows[index]) for index in alike.rows]).T)
        prices = _Seconds(Prices(alike.sizes, alike.hardware, k), alike)
        steps = schedule(alike.program, (len(alike.rows),), prices)
        found[alike.rows] = alike.tokens / steps.step_s
    return found


# ---- programs: emitted once, priced for every set of coefficients ---------------------------


class _Seconds:
    """Seconds of the costs of several runs, by number."""

    def __init__(self, prices: Prices, alike: Alike) -> None:
        self.contention = prices.contention
        nothing = np.zeros(len(alike.rows))
        self.seconds = [
            nothing if piece == "nothing" else getattr(prices, piece)(*given) * prices.k.level
            for piece, given in alike.asked
        ]

    def of(self, cost: Any) -> np.ndarray[Any, Any]:
        return self.seconds[cost]


class Emitted(NamedTuple):
    """A run's step, with numbers in place of costs, and the costs."""

    program: Program
    costs: list[Cost]
    sizes: Sizes


@cache
def _emitted(row: Row) -> Emitted:
    costs: list[Cost] = []

    def numbered(program: Program) -> Program:
        """The events that a schedule reads."""
        found: list[Event] = []
        for event in program:
            if isinstance(event, Repeat):
                found.append(event._replace(body=tuple(numbered(event.body))))
            elif isinstance(event, Run):
                costs.append(event.cost)
                found.append(event._replace(cost=len(costs) - 1))  # type: ignore[arg-type]
            elif isinstance(event, Wait):
                found.append(event)
        return tuple(found)

    program = numbered(step_program(row.units, row.columns))
    return Emitted(program, costs, Sizes(row.units, row.columns, "adamw"))


class Column:
    """Objects of several runs as one whose numbers are columns."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    def __getattr__(self, name: str) -> Any:
        value = _column([getattr(part, name) for part in self.parts])
        setattr(self, name, value)
        return value


def _column(values: list[Any]) -> Any:
    first = values[0]
    found: Any = Column(values)
    if isinstance(first, bool | str | Bandwidths | None):
        found = first
    elif isinstance(first, (int, float)):
        found = np.asarray(values)
    elif isinstance(first, np.ndarray):
        found = np.concatenate(values)
    elif isinstance(first, Mapping):
        found = {key: _column([value[key] for value in values]) for key in first}
    elif isinstance(first, tuple) and not hasattr(first, "_fields"):
        found = tuple(_column(list(parts)) for parts in zip(*values, strict=True))
    elif callable(first):
        found = _Calls(values)
    return found


class _Calls:
    """Methods of several objects as one that returns columns, the same ones for the same input."""

    def __init__(self, functions: list[Any]) -> None:
        self.functions = functions
        self.made: dict[tuple[Column | str, ...], Any] = {}

    def __call__(self, *given: Column | str) -> Any:
        if given not in self.made:
            results = [
                function(*(one if isinstance(one, str) else one.parts[index] for one in given))
                for index, function in enumerate(self.functions)
            ]
            self.made[given] = _column(results)
        return self.made[given]


class Alike(NamedTuple):
    """Runs whose steps have one structure: their joined program and the prices it asks for."""

    rows: list[int]
    tokens: np.ndarray[Any, Any]
    program: Program
    sizes: Any
    hardware: Any
    asked: list[tuple[str, tuple[Any, ...]]]


@lru_cache(maxsize=8)
def _alike(rows: tuple[Row, ...]) -> list[Alike]:
    groups: dict[object, list[int]] = {}
    for index, row in enumerate(rows):
        program, costs, _ = _emitted(row)
        pieces = tuple(
            (cost.piece, *(len(one) for one in cost.of if isinstance(one, tuple))) for cost in costs
        )
        low = row.strategy.linear_dtype
        key = (structure_key(program), pieces, row.compiled, low, row.hardware.measured)
        groups.setdefault(key, []).append(index)
    return [_joined([rows[index] for index in chosen], chosen) for chosen in groups.values()]


def _joined(rows: list[Row], chosen: list[int]) -> Alike:
    emitted = [_emitted(row) for row in rows]
    numbers: list[int] = []
    asked: dict[tuple[Any, ...], int] = {}
    given: list[tuple[str, tuple[Any, ...]]] = []
    columns: dict[tuple[Any, ...], Any] = {}
    for costs in zip(*(one.costs for one in emitted), strict=True):
        arguments = [list(values) for values in zip(*(cost.of for cost in costs), strict=True)]
        parts = [
            tuple(v.tobytes() if isinstance(v, np.ndarray) else id(v) for v in values)
            for values in arguments
        ]
        key = (costs[0].piece, *parts)
        if key not in asked:
            asked[key] = len(asked)
            of = [
                columns.setdefault(part, _column(v))
                for part, v in zip(parts, arguments, strict=True)
            ]
            given.append((costs[0].piece, tuple(of)))
        numbers.append(asked[key])
    return Alike(
        rows=chosen,
        tokens=np.asarray([row.tokens for row in rows]),
        program=_renumbered(join_programs([one.program for one in emitted]), numbers),
        sizes=Column([one.sizes for one in emitted]),
        hardware=Column([row.hardware for row in rows]),
        asked=given,
    )


def _renumbered(program: Program, numbers: list[int]) -> Program:
    """The program with one number for all costs that are the same."""
    found: list[Event] = []
    for event in program:
        if isinstance(event, Repeat):
            found.append(event._replace(body=tuple(_renumbered(event.body, numbers))))
        elif isinstance(event, Run):
            found.append(event._replace(cost=numbers[event.cost]))  # type: ignore[call-overload]
        else:
            found.append(event)
    return tuple(found)


def constant_efficiency(fit: list[Row], rows: list[Row]) -> np.ndarray[Any, Any]:
    """Baseline prediction: one constant share of the peak per device family."""

    def ideal(row: Row) -> float:
        work = predict_work(row.units, row.columns)
        return float(row.hardware.peak_flops * work.tokens[0] / work.hardware_flops[0])

    share = {
        kind: float(np.median([r.tokens_per_s / ideal(r) for r in fit if r.kind == kind]))
        for kind in {row.kind for row in fit}
    }
    return np.asarray([share[row.kind] * ideal(row) for row in rows])
