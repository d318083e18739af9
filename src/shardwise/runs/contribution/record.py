"""The record of a contribution: numbers, words of fixed lists and versions, no free text.

A field is either a number, a truth value, a word of a list that is part of Shardwise, or a version
that matches VERSION. So nothing that a user has named can be in it, whatever a run folder holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, StrictBool, WithJsonSchema

from shardwise.predict.work import MFU_CONVENTION
from shardwise.spec import catalogue
from shardwise.spec.adapter import ALL_LINEAR, Adapter, Stored
from shardwise.spec.cluster import ClusterSpec, DeviceSpec
from shardwise.spec.dtype import DType
from shardwise.spec.families import FAMILIES, linear_names
from shardwise.spec.job import Job
from shardwise.spec.mesh import Axis, InnerAxis
from shardwise.spec.model import Activation, Layout, ModelSpec, Norm
from shardwise.spec.record import Record, SpecError
from shardwise.spec.strategy import Strategy
from shardwise.step.profile import (
    CollectiveProfile,
    MemoryProfile,
    Provenance,
    StepProfile,
    ThroughputProfile,
    TimeProfile,
    Verdict,
    WorkProfile,
    with_inside,
)

SCHEMA = 1
KIND = "contribution"
# A public version: release, pre-release and the builds of torch; no other local label.
VERSION = (
    r"^[0-9]{1,4}(\.[0-9]{1,5}){1,3}((a|b|rc|\.dev|\.post)[0-9]{1,8})?"
    r"(\+(cpu|cu[0-9]{2,3}|rocm[0-9](\.[0-9]{1,2}){0,2}))?$"
)
# Targets of adapters that transformers has named.
TARGETS = tuple(
    sorted({ALL_LINEAR, *(name.rpartition(".")[2] for family in FAMILIES
                          for name in linear_names(family).values())})
)  # fmt: skip


def _one_of(known: tuple[str, ...]) -> Any:
    """A validator that accepts only words in `known`."""

    def check(word: str) -> str:
        if word not in known:
            raise ValueError(f"must be one of {', '.join(known)}")
        return word

    return AfterValidator(check)


def _number(value: object) -> object:
    """Return the value, but refuse text, which pydantic would convert to a number."""
    if isinstance(value, str):
        raise ValueError("must be a number, without a unit")
    return value


Version = Annotated[str, Field(pattern=VERSION)]
_DEVICES = tuple(catalogue.devices())
DeviceName = Annotated[str, _one_of(_DEVICES), WithJsonSchema({"enum": list(_DEVICES)})]
Family = Annotated[str, _one_of(tuple(FAMILIES)), WithJsonSchema({"enum": list(FAMILIES)})]
Target = Annotated[str, _one_of(TARGETS), WithJsonSchema({"enum": list(TARGETS)})]
Vendor = Literal["nvidia", "amd", "intel", "huawei"]
System = Literal["Linux", "Darwin", "Windows"]
Machine = Literal["x86_64", "aarch64", "arm64"]
Library = Literal[
    "python", "shardwise", "torch", "transformers", "tokenizers", "safetensors", "numpy", "pydantic"
]
MemoryTerm = Literal[
    "parameters", "gradients", "optimizer", "unsharded_parameters", "unsharded_gradients",
    "reduce_buffers", "activations", "logits", "working", "other",
]  # fmt: skip
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]
Group = Literal[Axis, InnerAxis, "reshard", "expert_shard", "world"]
# Sizes up to an exabyte, and seconds up to a day: far beyond any step, and never infinite.
Size = Annotated[int, BeforeValidator(_number), Field(ge=0, le=10**18)]
Count = Annotated[int, BeforeValidator(_number), Field(ge=1, le=10**13)]
Rate = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1e16)]
Flops = Annotated[float, BeforeValidator(_number), Field(gt=0, le=1e30)]
Seconds = Annotated[float, BeforeValidator(_number), Field(ge=0, le=86_400)]
Share = Annotated[float, BeforeValidator(_number), Field(ge=0)]


class Hardware(Record):
    """Devices and links. Rates are those of the data sheet, in bytes and FLOP per second."""

    # As the catalogue calls it; a device that it does not have is known by vendor and memory.
    device: DeviceName | None = None
    vendor: Vendor | None = None
    # Whether the name that the device reported contains the name of the catalogue.
    reported: StrictBool | None = None
    memory_bytes: Size
    memory_bytes_per_s: Rate
    link_bytes_per_s: Rate
    peak_flops: Mapping[DType, Flops]
    nodes: Count
    devices_per_node: Count
    network_bytes_per_s: Rate | None = None
    # Whether the prediction used coefficients that were measured on this cluster.
    calibrated: StrictBool = False

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    @property
    def label(self) -> str:
        """The name in the catalogue, or vendor and memory: `nvidia 24 GiB`."""
        return self.device or f"{self.vendor or 'unknown'} {self.memory_bytes / 2**30:.0f} GiB"

    @property
    def is_cpu(self) -> bool:
        return self.device == "CPU"

    def spec(self) -> ClusterSpec:
        """The cluster for predictions, without its calibration."""
        figures: dict[str, Any] = {
            "memory": self.memory_bytes,
            "memory_bandwidth": self.memory_bytes_per_s,
            "link_bandwidth": self.link_bytes_per_s,
            "peak": dict(self.peak_flops),
        }
        known = catalogue.devices().get(self.device or "")
        name = self.label.replace(" ", "-")
        device = known.but(**figures) if known else DeviceSpec.read({"name": name, **figures})
        return ClusterSpec.read(
            {
                "device": device,
                "nodes": self.nodes,
                "devices_per_node": self.devices_per_node,
                "network": self.network_bytes_per_s,
            },
            where="hardware",
        )


class Host(Record):
    """Operating system, processor and versions."""

    system: System | None = None
    machine: Machine | None = None
    cores: Count | None = None
    threads: Count | None = None
    versions: Mapping[Library, Version]


class Shape(Record):
    """Sizes and structure of a model that formulas describe; as in ModelSpec."""

    family: Family
    layers: Count
    hidden: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    ffn: Count
    vocab: Count
    max_positions: Count
    tied: StrictBool
    norm: Norm
    norm_parameters: Literal["weight+bias", "weight", "none"]
    layout: Layout
    qkv: Literal["split", "fused"]
    qk_norm: Literal["none", "head", "width"]
    mlp: Literal["plain", "gated", "gated_fused"]
    activation: Activation
    positions: Literal["learned", "rope", "alibi"]
    position_offset: Size
    attention_bias: StrictBool
    output_bias: StrictBool
    mlp_bias: StrictBool
    head_bias: StrictBool
    transposed_weights: StrictBool
    window: Count | None = None
    global_every: Count | None = None
    final_softcap: StrictBool
    experts: Count | None = None
    experts_per_token: Count | None = None
    dropout: Share


class AdapterShape(Record):
    """What is trained of a model, if not all of it."""

    rank: Count | None = None
    # Absent if a target has a name that transformers has not given.
    targets: tuple[Target, ...] | None = None
    dora: StrictBool
    base: Stored
    # Whether parameters are also trained in full.
    trains_parts: StrictBool


class Memory(Record):
    """As in MemoryProfile."""

    peak_allocated_bytes: Size
    terms: Mapping[MemoryTerm, Size]
    peak_reserved_bytes: tuple[Size, Size] | None = None
    capacity_bytes: Size | None = None
    verdict: Verdict | None = None


class Collective(Record):
    """As in CollectiveProfile."""

    op: Operation
    group: Group
    group_size: Count
    calls: Size
    bytes: Size


class Time(Record):
    """As in TimeProfile."""

    step_s: Annotated[Seconds, Field(gt=0)]
    step_s_interval: tuple[Seconds, Seconds] | None = None
    step_s_spread: tuple[Seconds, Seconds] | None = None
    compute_s: Seconds | None = None
    exposed_communication_s: Seconds | None = None
    exposed_copy_s: Seconds | None = None
    optimizer_s: Seconds | None = None
    tensor_s: Seconds | None = None
    context_s: Seconds | None = None
    expert_s: Seconds | None = None


class Work(Record):
    """As in WorkProfile."""

    tokens: Count
    model_flops: Flops
    hardware_flops: Flops


class Throughput(Record):
    """As in ThroughputProfile."""

    tokens_per_s: Rate
    tokens_per_s_per_device: Rate
    mfu: Share | None = None
    hfu: Share | None = None


class Step(Record):
    """One optimizer step, predicted or measured: the parts of a StepProfile."""

    shardwise: Version
    memory: Memory | None = None
    traffic: tuple[Collective, ...] = ()
    work: Work | None = None
    time: Time | None = None
    throughput: Throughput | None = None


class Contribution(Record):
    """One run: hardware, software, layout and shapes, and its step predicted and measured."""

    hardware: Hardware
    host: Host
    # Absent for a model that was traced.
    model: Shape | None = None
    parameters: Count
    trained_parameters: Count | None = None
    adapter: AdapterShape | None = None
    job: Job
    strategy: Strategy
    # Steps that were trained.
    steps: Count
    predicted: Step
    measured: Step

    def to_dict(self) -> dict[str, Any]:
        """The content of the file."""
        # By keys, not by JSON: sizes stay numbers.
        plain = self.model_dump(mode="python", exclude_none=True)
        return {"schema": SCHEMA, "kind": KIND, **plain}

    @classmethod
    def of_file(cls, data: object, where: str) -> Self:
        """Read the content of a file; raise one SpecError that lists every problem."""
        if not isinstance(data, Mapping) or data.get("kind") != KIND:
            raise SpecError(f'{where}: is not a contribution (kind = "{KIND}")')
        # True equals 1.
        if data.get("schema") != SCHEMA or type(data["schema"]) is not int:
            raise SpecError(
                f"{where}: schema is {str(data.get('schema'))[:20]}, this version reads {SCHEMA}; "
                "write the file with the newest Shardwise"
            )
        fields = {key: value for key, value in data.items() if key not in ("schema", "kind")}
        try:
            found = cls.read(fields)
            _same_kinds(fields, found.to_dict())
            # Refuse here what predictions would refuse later, with the name of the file.
            found.hardware.spec()
            found.model_spec()
        except SpecError as error:
            raise SpecError(f"{where}: {problem}" for problem in error.problems) from None
        return found

    def model_spec(self) -> ModelSpec | None:
        """The model for formulas; None if the contribution does not describe all of it."""
        if self.model is None:
            return None
        shape = {**self.model.model_dump(exclude_none=True), "name": KIND}
        if self.adapter is None:
            return ModelSpec.read(shape, where="model")
        if self.adapter.targets is None or self.adapter.trains_parts:
            return None
        adapter = Adapter.read(self.adapter.model_dump(exclude={"trains_parts"}), where="adapter")
        return ModelSpec.read({**shape, "adapter": adapter}, where="model")

    def profiles(self) -> tuple[StepProfile, StepProfile]:
        """The predicted and the measured StepProfile."""
        return self._profile(self.predicted, "predicted"), self._profile(self.measured, "measured")

    def _profile(self, step: Step, kind: Literal["predicted", "measured"]) -> StepProfile:
        """A StepProfile of one of the steps."""
        hardware, memory, work, rates = self.hardware, step.memory, step.work, step.throughput
        return StepProfile(
            provenance=Provenance(kind, step.shardwise, KIND),
            model={"name": KIND, "parameters": self.parameters},
            cluster={
                "name": str(hardware.spec()),
                "device": hardware.label,
                "devices": hardware.devices,
                "nodes": hardware.nodes,
            },
            job={"seq_len": self.job.seq_len, "optimizer": self.job.optimizer},
            strategy=self.strategy.model_dump(exclude={"within_node"}, exclude_none=True),
            memory=MemoryProfile(**memory.model_dump()) if memory else None,
            traffic=tuple(CollectiveProfile(**one.model_dump()) for one in step.traffic),
            work=WorkProfile(**work.model_dump(), convention=MFU_CONVENTION) if work else None,
            time=TimeProfile(**with_inside(step.time.model_dump())) if step.time else None,
            throughput=ThroughputProfile(
                **rates.model_dump(), mfu_convention=MFU_CONVENTION if rates.mfu else None
            )
            if rates
            else None,
        )


def _same_kinds(given: object, read: object, path: str = "") -> None:
    """Raise SpecError for a value that was read as another kind, such as `true` as 1.

    A file holds values as `to_dict` gives them. `path` is the key of the value.
    """
    if isinstance(given, Mapping) and isinstance(read, Mapping):
        for key, value in given.items():
            if value is not None:
                _same_kinds(value, read.get(key), f"{path}.{key}" if path else str(key))
    elif isinstance(given, list) and isinstance(read, (list, tuple)):
        for one, other in zip(given, read, strict=True):
            _same_kinds(one, other, path)
    elif any(isinstance(given, kind) != isinstance(read, kind) for kind in (bool, str)):
        wanted = "true or false" if isinstance(read, bool) else "a number"
        raise SpecError(f"{path}: must be {'a word' if isinstance(read, str) else wanted}")
