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
from functools import cache
from typing import Any, NamedTuple

from benchmarks.published_2026 import NETWORK, Left
from benchmarks.validation import FOLDER, Row, devices_per_node
from shardwise.predict.configurations import Configurations
from shardwise.predict.kernels import hardware_of
from shardwise.spec.catalogue import find_device
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.kernels import distinct_groups
from shardwise.spec.lookup import find_model
from shardwise.spec.model import ModelSpec
from shardwise.spec.question import describe_run
from shardwise.spec.record import SpecError
from shardwise.spec.software import Software, find_software
from shardwise.spec.strategy import Strategy
from shardwise.units.load import load_units

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
        return _settings().get((self.stack, self.model, self.gpu, precision))

    def copies(self, groups: int) -> float:
        """Mean number of `groups` of ranks that a token is sent to, its own among them."""
        model, settings = model_of(self), self.settings
        assert model.experts is not None
        assert model.experts_per_token is not None
        if settings is not None and settings.routing == "forced, neighbours":
            return max(1.0, model.experts_per_token * groups / model.experts)
        return distinct_groups(model.experts, model.experts_per_token, groups)


def split_of(stack: str, model: str, gpu: str) -> str:
    """The frozen side of all rows of a stack, model and device: by a hash of their names."""
    named = "/".join((stack, model, gpu)).encode()
    return "heldout" if int(hashlib.sha256(named).hexdigest(), 16) % 2 else "fit"


def published(splits: Iterable[str]) -> list[Published]:
    """Every run with experts and without a pipeline, of these splits."""
    chosen = set(splits)
    return [row for row in (*_automodel(), *_megatron_bridge()) if row.split in chosen]


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


@cache
def _settings() -> dict[tuple[str, str, str, str], Settings]:
    with (FOLDER / "expert_settings.csv").open(encoding="utf-8", newline="") as file:
        return {
            (raw["stack"], raw["model"], raw["gpu"], raw["precision"]): Settings(
                dispatcher=raw["dispatcher"],
                grouped=raw["grouped"],
                recompute=raw["recompute"],
                reshard=raw["reshard"] == "yes",
                graphs=raw["graphs"],
                overlapped=raw["overlapped"] == "yes",
                routing=raw["routing"],
                source=raw["source"],
            )
            for raw in csv.DictReader(file)
        }


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
    hardware = hardware_of(described.cluster, described.strategy.param_dtype)
    assert hardware is not None
    return Row(
        id=run.id,
        source=run.source,
        split=run.split,
        device=described.cluster.device,
        software=_software(run),
        devices=run.gpus,
        units=load_units(described.model, run.seq_len, described.strategy),
        strategy=described.strategy,
        columns=Configurations.of([described.strategy]),
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
