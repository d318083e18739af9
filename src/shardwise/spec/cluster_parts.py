"""Clusters of unequal devices: parts of equal ones, and one network between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from shardwise.spec.cluster import ClusterPart, ClusterSpec, DeviceSpec
from shardwise.spec.record import Problems, SpecError


def parse_parts(text: str, read: Callable[[str], ClusterSpec]) -> ClusterSpec:
    """The cluster of `A + B`, of which `read` reads each part."""
    parts, problems = [], Problems()
    for one in text.split("+"):
        with problems.collect():
            parts.append(read(one.strip()))
    problems.raise_if_any()
    return join_parts(parts)


def join_parts(parts: Sequence[ClusterSpec]) -> ClusterSpec:
    """One cluster of several; the slowest of their networks connects them.

    Raises SpecError if none has a network, or if they cannot train one model together.
    """
    first = parts[0]
    networks = [one.network for one in parts if one.network is not None]
    if not networks:
        raise SpecError(
            "cluster: its parts need a network between them; write it per device behind the last, "
            "such as 1x8xH100-SXM + 1x8xA100-80GB@200Gbps"
        )
    if len({one.device.is_cpu for one in parts}) > 1:
        raise SpecError("cluster: CPUs and GPUs cannot train one model together; leave one out")
    if any(one.parts for one in parts) or len({one.software for one in parts}) > 1:
        raise SpecError("cluster: each part needs equal devices, and all of them one software")
    # A node of the whole is as large as fits in every part, so that no group seems inside a node
    # that lies in two.
    per_node = math.gcd(*(one.devices_per_node for one in parts))
    alike = all(one.device == first.device and not one.calibration for one in parts)
    return ClusterSpec(
        device=first.device,
        nodes=sum(one.devices for one in parts) // per_node,
        devices_per_node=per_node,
        network=min(networks),
        software=first.software,
        calibration=first.calibration,
        parts=None
        if alike
        else tuple(
            ClusterPart(
                device=one.device,
                devices=one.devices,
                nodes=one.nodes,
                network=one.network if one.network != min(networks) else None,
                calibration=one.calibration,
            )
            for one in parts
        ),
    )


def with_parts(table: dict[str, Any], find: Callable[[str], DeviceSpec]) -> dict[str, Any]:
    """A table of a cluster with the devices of its parts found by name, the first as its own."""
    parts = table.get("parts")
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        return table
    found, problems = [], Problems()
    for number, part in enumerate(parts):
        try:
            named = isinstance(part.get("device"), str)
            found.append({**part, "device": find(part["device"])} if named else part)
        except SpecError as error:
            problems.found.append(f"parts[{number}].device: {error}")
    problems.raise_if_any()
    own = {"device": found[0].get("device")} if found and "device" not in table else {}
    return {**own, **table, "parts": found}
