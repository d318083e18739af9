"""Published runs with expert parallelism as inputs of the predictor, or why one is not predicted.

Layouts and throughputs are those of the tables in benchmarks/data/multidim. What a table does not
say (dispatcher, recompute, balance of the routing) was read in the configuration that its stack
publishes beside it: data/expert_settings.csv, with the place where it was read. Runs whose routing
is forced are upper bounds: real routing leaves some ranks more tokens. AutoModel's forced routing
also gives a token neighbouring experts, so that it travels to one or two ranks instead of five.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

from benchmarks.published_2026 import NETWORK, Left
from benchmarks.validation import FOLDER, Row, devices_per_node
from shardwise.predict.configurations import Configurations
from shardwise.predict.kernels import hardware_of
from shardwise.spec.catalogue import find_device
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.lookup import find_model
from shardwise.spec.model import ModelSpec
from shardwise.spec.question import describe_run
from shardwise.spec.record import SpecError
from shardwise.spec.software import Software, find_software
from shardwise.spec.strategy import Strategy
from shardwise.units.dispatch import Copies, copies_among, groups_among, sent_by_library
from shardwise.units.division import Exchanges
from shardwise.units.load import load_units
from shardwise.units.stage import Stage
from shardwise.units.unit import ModelUnits, Unit

DEVICES = {
    "H100": "H100-SXM",
    "B200": "B200",
    "B300": "B300",
    "GB200": "GB200",
    "GB300": "GB300",
}
# The sizes of gpt-oss; biases of experts and attention sinks are left out, 0.1 % of parameters.
_GPT_OSS = {
    "family": "mixtral",
    "hidden": 2880,
    "heads": 64,
    "kv_heads": 8,
    "head_dim": 64,
    "ffn": 2880,
    "vocab": 201088,
    "max_positions": 131072,
    "experts_per_token": 4,
    "window": 128,
    "global_every": 2,
    "attention_bias": True,
    "output_bias": True,
}
SHAPES: dict[str, dict[str, Any]] = {
    "gpt-oss-120b": {"name": "gpt-oss-120b", "layers": 36, "experts": 128, **_GPT_OSS},
    "gpt-oss-20b": {"name": "gpt-oss-20b", "layers": 24, "experts": 32, **_GPT_OSS},
}
# Models of the tables; others, such as hybrids with state-space layers, have no formulas.
MODELS = {
    "Qwen3 MoE 30B": "qwen3-30b-a3b",
    "Qwen3_30B_a3B": "qwen3-30b-a3b",
    "qwen3-30b-a3b": "qwen3-30b-a3b",
    "Qwen3_235B_a22B": "qwen3-235b-a22b",
    "qwen3-235b-a22b": "qwen3-235b-a22b",
    "GPT-OSS 20B": "gpt-oss-20b",
    "GPT-OSS 120B": "gpt-oss-120b",
    "GPT OSS 120B": "gpt-oss-120b",
}
PRECISIONS = {"BF16": None, "FP8": "fp8", "FP8-MX": "mxfp8", "MXFP8": "mxfp8", "NVFP4": "nvfp4"}
# Degree of experts where a table has a dash: from the same configuration as its settings.
DEGREES = {("AutoModel", "GPT-OSS 120B"): 64, ("AutoModel", "GPT-OSS 20B"): 8}

# Rows whose own notes say whether dispatch runs beside compute.
OVERLAPPED = {"msc-050": False, "msc-051": True}


class Settings(NamedTuple):
    """What a stack's configuration says of a run."""

    dispatcher: str
    grouped: str
    recompute: str
    reshard: bool
    graphs: str
    # Whether dispatch and combine run beside the compute of another micro-batch.
    overlapped: bool
    # "forced, random": other experts for each token, as often each; "forced, neighbours": the next
    # experts for each token, in turn; "natural" for a trained router.
    routing: str
    source: str

    @property
    def upper_bound(self) -> bool:
        """Whether real routing would be slower: no rank waits for one with more tokens."""
        return self.routing != "natural"


class Published(NamedTuple):
    """A row of a table, with one name for each fact."""

    id: str
    source: str
    split: str
    stack: str
    release: str
    model: str
    gpu: str
    gpus: int
    precision: str
    sequences: int
    micro_batch: int
    seq_len: int
    tensor: int
    context: int
    pipeline: int
    expert: int
    tokens_per_s: float

    @property
    def settings(self) -> Settings | None:
        """What the configuration of the run says; None where none was read."""
        precision = {"FP8-MX": "MXFP8"}.get(self.precision, self.precision)
        known = _settings().get((self.stack, self.model, self.gpu, precision), {})
        # Settings hold from a release on, until the next.
        held = [since for since in known if since <= self.release]
        if not held:
            return None
        found = known[max(held)]
        return found._replace(overlapped=OVERLAPPED.get(self.id, found.overlapped))


def split_of(stack: str, model: str, gpu: str) -> str:
    """The frozen side of all rows of a stack, model and device: by a hash of their names."""
    named = "/".join((stack, model, gpu)).encode()
    return "heldout" if int(hashlib.sha256(named).hexdigest(), 16) % 2 else "fit"


def published(splits: Iterable[str]) -> list[Published]:
    """Every run with experts and without a pipeline, of these splits."""
    chosen = set(splits)
    return [row for row in (*_automodel(), *_megatron_bridge(), *_recent()) if row.split in chosen]


def _rows(table: str) -> Iterator[tuple[int, dict[str, str]]]:
    path = FOLDER / "multidim" / f"{table}.csv"
    with path.open(encoding="utf-8", newline="") as file:
        yield from enumerate(csv.DictReader(file))


def _automodel() -> Iterator[Published]:
    seen = set()
    for number, raw in _rows("automodel"):
        if "DeepEP" not in raw["Kernel Optimizations"] or raw["PP"] != "1":
            continue
        model, degree = raw["Model"].partition(" (")[0], raw["EP"]
        if (model, raw["#GPUs"]) in seen:
            # An earlier state of a run that its other page prints anew.
            continue
        seen.add((model, raw["#GPUs"]))
        yield Published(
            id=f"atm-{number:03}",
            source=raw["source"],
            split=split_of("AutoModel", model, "H100"),
            stack="AutoModel",
            release="2026-02",
            model=model,
            gpu="H100",
            gpus=int(raw["#GPUs"]),
            precision="BF16",
            sequences=int(raw["GBS"]),
            micro_batch=int(raw["LBS"]),
            seq_len=int(raw["Seq Length"]),
            tensor=int(raw["TP"]),
            context=int(raw["CP"]),
            pipeline=int(raw["PP"]),
            expert=int(degree) if degree.isdigit() else DEGREES["AutoModel", model],
            tokens_per_s=float(raw["Tokens/sec/GPU"].replace(",", "")),
        )


def _megatron_bridge() -> Iterator[Published]:
    for number, raw in _rows("megatron_bridge"):
        if not raw["ep"].isdigit() or int(raw["ep"]) == 1 or raw["pp"] != "1":
            continue
        model, gpu = raw["model"].partition(" (")[0], raw["system"].removeprefix("DGX-")
        dropped = "tokendrop" in raw["model"]
        yield Published(
            id=f"mbr-{number:03}",
            source=f"{raw['source']}, {raw['container'].removesuffix(' NeMo Container')}",
            split=split_of("Megatron-Bridge", model, gpu),
            stack="Megatron-Bridge",
            release=raw["container"].removesuffix(" NeMo Container"),
            model=f"{model} (tokens dropped)" if dropped else model,
            gpu=gpu,
            gpus=int(raw["gpus"]),
            precision=raw["precision"],
            sequences=int(raw["gbs"]),
            micro_batch=int(raw["mbs"]),
            seq_len=int(raw["seq_len"]),
            tensor=int(raw["tp"]),
            context=int(raw["cp"]),
            pipeline=int(raw["pp"]),
            expert=int(raw["ep"]),
            # In brackets: with scales of other blocks.
            tokens_per_s=float(raw["tokens_per_s_per_gpu"].partition(" (")[0]),
        )


def _recent() -> Iterator[Published]:
    """Runs of the table of 2024 to 2026 whose layout and sequence are stated; its own split."""
    for _, raw in _rows("published_2026"):
        if raw["id"] in OVERLAPPED:
            yield Published(
                id=raw["id"],
                source=raw["source"],
                split=raw["split"],
                stack=raw["framework"],
                release="26.08",
                model="Qwen3_30B_a3B",
                gpu="H100",
                gpus=int(raw["gpus"]),
                precision=raw["precision"].upper(),
                sequences=int(raw["gbs"]),
                micro_batch=int(raw["mbs"]),
                seq_len=int(raw["seq"]),
                tensor=int(raw["tp"]),
                context=int(raw["cp"]),
                pipeline=int(raw["pp"]),
                expert=int(raw["ep"]),
                tokens_per_s=float(raw["tokens_per_s_per_gpu"]),
            )


@cache
def _settings() -> dict[tuple[str, str, str, str], dict[str, Settings]]:
    """The settings of each stack, model, device and precision, by their first release."""
    found: dict[tuple[str, str, str, str], dict[str, Settings]] = {}
    with (FOLDER / "expert_settings.csv").open(encoding="utf-8", newline="") as file:
        for raw in csv.DictReader(file):
            named = (raw["stack"], raw["model"], raw["gpu"], raw["precision"])
            found.setdefault(named, {})[raw["since"]] = Settings(
                dispatcher=raw["dispatcher"],
                grouped=raw["grouped"],
                recompute=raw["recompute"],
                reshard=raw["reshard"] == "yes",
                graphs=raw["graphs"],
                overlapped=raw["overlapped"] == "yes",
                routing=raw["routing"],
                source=raw["source"],
            )
    return found


# ---- as inputs of the predictor -----------------------------------------------------------------


def read_experts(splits: Iterable[str] = ("fit",)) -> tuple[list[Row], list[Left]]:
    """The runs of these splits, and those that cannot be expressed."""
    found: list[Row] = []
    left: list[Left] = []
    for run in published(splits):
        why = _why_not(run)
        if not why:
            try:
                found.append(row_of(run))
            except SpecError as error:
                why = str(error)
        if why:
            left.append(Left(run.id, why))
    return found, left


def _why_not(run: Published) -> str:
    """Why a run cannot be expressed; empty where it can."""
    reasons = {
        "tokens are dropped": "tokens dropped" in run.model,
        "model has layers without a formula": run.model not in MODELS,
        "precision not stated": run.precision not in PRECISIONS,
        "experts with tensor or context parallelism": run.tensor * run.context > 1,
        "no configuration of the run was read": run.settings is None,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def cluster_of(run: Published) -> ClusterSpec:
    """The machine of a run: NVLink joins up to 72 devices of a GB200 or GB300 rack."""
    per_node = devices_per_node(run.gpu, run.gpus, 8)
    several = {"network": NETWORK} if run.gpus > per_node else {}
    return ClusterSpec(
        device=find_device(DEVICES[run.gpu]),
        nodes=run.gpus // per_node,
        devices_per_node=per_node,
        **several,  # type: ignore[arg-type]
    )


def model_of(run: Published) -> ModelSpec:
    """The model of a run, with positions for its sequences."""
    name = MODELS[run.model]
    found = ModelSpec.read(SHAPES[name]) if name in SHAPES else find_model(name)
    assert isinstance(found, ModelSpec)
    return found.but(max_positions=max(found.max_positions, run.seq_len))


def strategy_of(run: Published) -> Strategy:
    """FSDP2 in AutoModel; a distributed optimizer in Megatron, where parameters stay gathered.

    Both call TransformerEngine, whose kernels join norms, rotations and activations as a compiler
    does.
    """
    settings = run.settings
    assert settings is not None
    fields: dict[str, Any] = {
        "kind": "zero3" if settings.reshard else "zero2",
        "expert": run.expert,
        "micro_batch": run.micro_batch,
        "accumulate": run.sequences // run.gpus // run.micro_batch,
        # Norms and activations of experts cost little time to compute again.
        "recompute": "full" if settings.recompute == "full" else "none",
        "compile": True,
    }
    if run.stack == "Megatron-Bridge":
        fields["kind"] = "zero1"
    low = PRECISIONS[run.precision]
    return Strategy.read(fields | ({"linear_dtype": low} if low else {}))


def row_of(run: Published) -> Row:
    """A run as the predictor takes it; SpecError if it cannot be expressed."""
    described = describe_run(
        model_of(run), cluster_of(run), seq_len=run.seq_len, strategy=strategy_of(run)
    )
    strategy = described.strategy
    hardware = hardware_of(described.cluster, strategy.param_dtype)
    assert hardware is not None
    units = load_units(described.model, run.seq_len, strategy)
    plain = load_units(described.model, run.seq_len, strategy.but(expert=1))
    return Row(
        id=run.id,
        source=run.source,
        split=run.split,
        device=described.cluster.device,
        software=_software(run),
        devices=run.gpus,
        units=_as_stack(run, units, plain, hardware.devices_per_node),
        strategy=strategy,
        columns=Configurations.of([strategy]),
        hardware=hardware,
        tokens_per_s=run.tokens_per_s,
        regime="experts",
    )


def _software(run: Published) -> Software:
    """The kernels of TransformerEngine, under the name of the stack."""
    found, name = find_software("megatron"), run.stack.lower()
    if run.stack == "AutoModel" and "GPT-OSS" in run.model:
        found = found.but(attention=dict.fromkeys(found.attention, "flex"))
    return found.but(name=name, stack=name)


# ---- dispatchers --------------------------------------------------------------------------------


def _as_stack(run: Published, units: ModelUnits, plain: ModelUnits, in_node: int) -> ModelUnits:
    """The units with the dispatcher of a run's stack, whose kernels sort tokens once."""
    assert run.settings is not None
    sent = sent_by_library(units, plain, copies_of(run, in_node))
    made = {block: _scheduled(run.settings, block) for block in dict.fromkeys(sent.blocks)}
    return replace(sent, blocks=tuple(made[block] for block in sent.blocks))


def copies_of(run: Published, in_node: int) -> Copies:
    """Copies of a token with the dispatcher of a run, and with its routing."""
    assert run.settings is not None
    if run.settings.dispatcher == "all-to-all":
        return lambda _, chosen: float(chosen)
    if run.settings.routing == "forced, neighbours":
        groups = groups_among(run.expert, in_node)
        return lambda experts, chosen: max(1.0, chosen * groups / experts)
    return copies_among(run.expert, in_node)


def _scheduled(settings: Settings, block: Unit) -> Unit:
    """A block whose tokens take no time beside another micro-batch, and no host in full graphs."""

    def scheduled(stage: Stage) -> Stage:
        kept = (
            tuple(
                one._replace(bytes=0.0) if settings.overlapped and not one.host else one
                for one in way
                if not (one.host and settings.graphs == "full step")
            )
            for way in stage.exchanges
        )
        parts = tuple(map(scheduled, stage.parts))
        return replace(stage, parts=parts, exchanges=Exchanges(*kept))

    return replace(block, stage=scheduled(block.stage))
