"""The cluster: devices, how many, and the network between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from shardwise.spec.calibration import Calibration
from shardwise.spec.dtype import DType
from shardwise.spec.instance import Instance, find_instance
from shardwise.spec.level import Level
from shardwise.spec.quantity import (
    ByteRate,
    Bytes,
    Flops,
    QuantityError,
    Rate,
    parse_rate,
    write_rate,
)
from shardwise.spec.record import Problems, Record, SpecError
from shardwise.spec.software import find_software

PositiveInt = Annotated[int, Field(ge=1, le=10**7)]


def _has_a_unit(size: int) -> int:
    if size < 2**20:
        raise ValueError(f"{size} bytes is no memory of a device; write it like 80GiB")
    return size


def _known_software(name: str) -> str:
    return find_software(name).name


def _known_instance(name: str) -> str:
    found = find_instance(name)
    if found is None:
        raise ValueError(f"{name[:60]!r} is no instance of 'shardwise catalog instances'")
    return found.name


Memory = Annotated[Bytes, AfterValidator(_has_a_unit)]

# Servers hold up to this many PCIe cards, whatever node size the catalogue gives for the card.
LARGEST_PCIE_NODE = 8
_SHORTHAND = re.compile(r"(?:(\d{1,7})\s*x\s*)?(?:(\d{1,7})\s*x\s*)?([^@\s]+?)\s*(?:@\s*(.+?))?\s*")
FORM = (
    "nodes x GPUs x device @ network per GPU, such as 4x8xH100-SXM@400Gbps or 8xA100-80GB, or "
    "nodes x instance, such as 4xp5.48xlarge"
)


class DeviceSpec(Record):
    """One kind of device. Peaks are dense, links per direction; `source` names their sources."""

    name: str
    title: str = ""
    memory: Memory
    # The total memory that the runtime reports, a little below the nominal size.
    usable_memory: Memory | None = None
    memory_bandwidth: Annotated[ByteRate, Field(gt=0)]
    link: str = "PCIe"
    link_bandwidth: Annotated[ByteRate, Field(gt=0)]
    # Whether devices of a node can read each other's memory; otherwise copies go through the host.
    p2p: bool = True
    node_size: PositiveInt = 8
    peak: Mapping[str, Flops]
    source: Mapping[str, str] = Field(default_factory=dict, repr=False)

    @property
    def capacity(self) -> int:
        """Memory in bytes that the runtime reports, or the nominal size."""
        return self.usable_memory or self.memory

    @property
    def is_cpu(self) -> bool:
        return self.name.upper().startswith("CPU")

    def peak_flops(self, dtype: DType) -> float | None:
        """The dense peak in FLOP/s for a dtype, possibly a placeholder; None if there is none."""
        return self.peak.get(dtype)

    def known_peak_flops(self, dtype: DType) -> float | None:
        """The dense peak in FLOP/s; None if unknown or only a placeholder."""
        return None if self.source.get("peak") == "placeholder" else self.peak_flops(dtype)


class ClusterPart(Record):
    """So many consecutive devices of a cluster that are alike, on so many nodes."""

    device: DeviceSpec
    devices: PositiveInt
    nodes: PositiveInt = 1
    # Between its own nodes, where that is not the network of the cluster.
    network: Annotated[Rate, Field(gt=0)] | None = None
    calibration: Calibration | None = None

    @model_validator(mode="after")
    def _fill_nodes(self) -> Self:
        if self.devices % self.nodes:
            raise ValueError(f"{self.devices} devices do not fill {self.nodes} nodes evenly")
        return self

    def __str__(self) -> str:
        return f"{self.nodes}x{self.devices // self.nodes}x{self.device.name}"


class ClusterSpec(Record):
    """`nodes` machines of `devices_per_node` equal devices; `network` is per device, one way.

    Groups that span more than `pod_nodes` nodes share links between pods, which are
    `oversubscription` times slower.
    """

    device: DeviceSpec
    nodes: PositiveInt = 1
    devices_per_node: PositiveInt = 1
    network: Annotated[Rate, Field(gt=0)] | None = None
    pod_nodes: PositiveInt | None = None
    oversubscription: Annotated[float, Field(ge=1, le=1000)] = 1.0
    # The software of its runs, a name of `shardwise catalog software`; unset, that of the trainer.
    software: Annotated[str, AfterValidator(_known_software)] | None = None
    # The instance that every node is, a name of `shardwise catalog instances`; it has a price.
    instance: Annotated[str, AfterValidator(_known_instance)] | None = None
    # Written by `shardwise calibrate`; without it, the catalogue's coefficients are used.
    calibration: Calibration | None = None
    # Where devices differ: what they are, by rank. `device` and `calibration` are of the first.
    parts: Annotated[tuple[ClusterPart, ...], Field(min_length=1)] | None = None
    # Written by `plan` and `estimate` with `--measured`: a few steps of a user's own stack.
    level: Level | None = None

    @model_validator(mode="after")
    def _as_its_instance(self) -> Self:
        """Raise ValueError if the nodes are not those of the named instance."""
        found = None if self.instance is None else find_instance(self.instance)
        if found and (found.device, found.gpus) != (self.device.name, self.devices_per_node):
            raise ValueError(
                f"instance: {found.name} has {found.gpus} x {found.device}, not "
                f"{self.devices_per_node} x {self.device.name}; leave instance out"
            )
        return self

    @model_validator(mode="after")
    def _is_its_parts(self) -> Self:
        """Raise ValueError if the parts are not the devices of the cluster."""
        if self.parts is None:
            return self
        devices = sum(part.devices for part in self.parts)
        if devices != self.devices or self.parts[0].device != self.device:
            raise ValueError(
                f"parts: are {devices} devices from {self.parts[0].device.name} on, but the "
                f"cluster has {self.devices} from {self.device.name} on; make them the same"
            )
        return self

    @property
    def devices(self) -> int:
        return self.nodes * self.devices_per_node

    def as_if(self, part: ClusterPart) -> Self:
        """A cluster of the same size and network, whose devices are all those of one part."""
        return self.but(device=part.device, calibration=part.calibration, parts=None)

    def alone(self, part: ClusterPart) -> Self:
        """The cluster that one part is without the others."""
        return self.as_if(part).but(
            nodes=part.nodes,
            devices_per_node=part.devices // part.nodes,
            network=part.network or self.network,
        )

    def but(self, **changes: object) -> Self:
        """A validated copy with some fields changed; of other nodes it is no instance any more."""
        unlike = any(
            name in changes and changes[name] != getattr(self, name)
            for name in ("device", "devices_per_node")
        )
        return super().but(**({"instance": None} if unlike else {}), **changes)

    def __repr__(self) -> str:
        calibrated = ", calibrated" if self.calibration else ""
        return f"Cluster({str(self)!r}{calibrated})"

    def __str__(self) -> str:
        network = f"@{write_rate(self.network)}" if self.network else ""
        if self.parts is not None:
            return f"{' + '.join(str(part) for part in self.parts)}{network}"
        return f"{self.nodes}x{self.devices_per_node}x{self.device.name}{network}"


def parse_cluster(text: str, find: Callable[[str], DeviceSpec | Instance]) -> ClusterSpec:
    """Read the shorthand `[nodes x] [GPUs x] device [@ network per GPU]`, or `[nodes x] instance`.

    `find` looks a device or an instance up by name.

    A single count is GPUs: up to the device's usual node size they share a node, above it they must
    fill complete nodes. Without a network, up to 8 PCIe cards are also assumed to share a node.
    """
    match = _SHORTHAND.fullmatch(text)
    if match is None:
        raise SpecError(f"cluster: cannot read {text[:60]!r}; write {FORM}")
    first, second, name, rate = match.groups()
    problems = Problems()
    found = network = None
    try:
        found = find(name)
    except SpecError as error:
        problems.found.extend(f"cluster: {problem}" for problem in error.problems)
    with problems.collect():
        network = None if rate is None else _network(rate)
    nodes, per_node = 1, 1
    if isinstance(found, Instance):
        with problems.collect():
            nodes = _nodes(first, second, found)
        problems.raise_if_any()
        return _of_instance(found, nodes, network, find)
    with problems.collect():
        nodes, per_node = _counts(first, second, found, with_network=rate is not None)
    if nodes < 1 or per_node < 1:
        problems.found.append(f"cluster: counts must be at least 1 in {text[:60]!r}")
    problems.raise_if_any()
    assert found is not None
    return ClusterSpec(device=found, nodes=nodes, devices_per_node=per_node, network=network)


def _network(text: str) -> float:
    """Bytes per second of a network; SpecError if they are not more than 0."""
    try:
        rate = parse_rate(text)
    except QuantityError as error:
        raise SpecError(f"cluster: network: {error}") from None
    if rate <= 0:
        raise SpecError("cluster: network: must be more than 0")
    return rate


def _counts(
    first: str | None, second: str | None, device: DeviceSpec | None, *, with_network: bool
) -> tuple[int, int]:
    """Nodes and GPUs per node of a shorthand's counts; SpecError if they do not fill nodes."""
    if second is not None:
        return int(first or 1), int(second)
    if first is None or device is None:
        return 1, 1
    count, largest = int(first), device.node_size
    if not with_network and "PCIe" in device.link:
        largest = max(largest, LARGEST_PCIE_NODE)
    per_node = count if count <= largest else device.node_size
    nodes = count // per_node if per_node else 0
    if nodes * per_node != count:
        raise SpecError(
            f"cluster: {count} x {device.name} does not fill nodes of {device.node_size}; "
            f"write nodes x GPUs, such as 1x{count}x{device.name}"
        )
    return nodes, per_node


def _nodes(first: str | None, second: str | None, instance: Instance) -> int:
    """The number of instances; SpecError if GPUs are counted too, or if there is none."""
    if second is not None:
        raise SpecError(
            f"cluster: {instance.name} is a machine of {instance.gpus} x {instance.device}; count "
            f"machines only, such as {first}x{instance.name}"
        )
    if first is not None and int(first) < 1:
        raise SpecError(f"cluster: counts must be at least 1 in {first}x{instance.name}")
    return int(first or 1)


def _of_instance(
    instance: Instance,
    nodes: int,
    network: float | None,
    find: Callable[[str], DeviceSpec | Instance],
) -> ClusterSpec:
    """A cluster of instances; a given network per device replaces their own."""
    return ClusterSpec.read(
        {
            "device": find(instance.device or ""),
            "nodes": nodes,
            "devices_per_node": instance.gpus,
            "network": network or instance.network_per_gpu,
            "instance": instance.name,
        },
        where="cluster",
    )
