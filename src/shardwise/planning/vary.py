"""Change one quantity of a problem: network, link, memory, device, devices, length or batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwise.planning.problem import Problem
from shardwise.spec import catalogue
from shardwise.spec.cluster import ClusterSpec
from shardwise.spec.quantity import (
    QuantityError,
    parse_bytes,
    parse_count,
    parse_rate,
    show_count,
    show_gib,
    write_byte_rate,
    write_rate,
)
from shardwise.spec.record import SpecError, did_you_mean
from shardwise.spec.wording import KeyedProblem


def with_quantity(problem: Problem, name: str, text: str) -> tuple[Problem, str]:
    """The problem with the quantity `name` set to the value `text`, and the value for screens."""
    if name not in VARIABLES:
        hint = did_you_mean(name, VARIABLES) or f"; known are {', '.join(VARIABLES)}"
        raise SpecError(f"vary: unknown quantity {name[:40]!r}{hint}")
    try:
        return VARIABLES[name](problem, text)
    except QuantityError as error:
        raise SpecError(f"vary: {name}: {error}") from None


def _network(problem: Problem, text: str) -> tuple[Problem, str]:
    rate = parse_rate(text if not _is_bare_number(text) else f"{text}Gbps")
    if rate <= 0:
        raise _vary_error("network", "must be more than 0; write it like 400Gbps")
    if problem.cluster.nodes == 1:
        raise _vary_error(
            "network",
            "a single node has no network; give a cluster of several nodes, such as "
            f"--cluster {_several_nodes(problem.cluster)}",
        )
    return _with_cluster(problem, network=rate), write_rate(rate)


def _link(problem: Problem, text: str) -> tuple[Problem, str]:
    rate = parse_rate(text if not _is_bare_number(text) else f"{text}GB/s")
    if rate <= 0:
        raise _vary_error("link", "must be more than 0; write it like 450GB/s")
    # The calibration was measured with the original link.
    device = problem.cluster.device.but(link_bandwidth=rate)
    return _with_cluster(problem, device=device, calibration=None), write_byte_rate(rate)


def _memory(problem: Problem, text: str) -> tuple[Problem, str]:
    size = parse_bytes(text if not _is_bare_number(text) else f"{text}GiB")
    device = problem.cluster.device.but(memory=size, usable_memory=None)
    return _with_cluster(problem, device=device), show_gib(size)


def _device(problem: Problem, text: str) -> tuple[Problem, str]:
    """The problem on the device type `text`, and the name of that type.

    The calibration is dropped, unless the device stays the same.
    """
    device = catalogue.find_device(text)
    if device.name == problem.cluster.device.name:
        return problem, device.name
    # The calibration was measured on the original device.
    return _with_cluster(problem, device=device, calibration=None), device.name


def _devices(problem: Problem, text: str) -> tuple[Problem, str]:
    cluster = with_devices(problem.cluster, parse_count(text))
    return problem._replace(cluster=cluster), f"{cluster.devices:,}"


def _seq_len(problem: Problem, text: str) -> tuple[Problem, str]:
    job = problem.job.but(seq_len=parse_count(text))
    return problem._replace(job=job), f"{job.seq_len:,}"


def _global_batch(problem: Problem, text: str) -> tuple[Problem, str]:
    job = problem.job.but(global_batch=parse_count(text))
    return problem._replace(job=job), show_count(job.global_batch or 0)


VARIABLES: dict[str, Callable[[Problem, str], tuple[Problem, str]]] = {
    "network": _network,
    "link": _link,
    "memory": _memory,
    "device": _device,
    "devices": _devices,
    "seq-len": _seq_len,
    "global-batch": _global_batch,
}


def _vary_error(name: str, reason: str) -> SpecError:
    return SpecError(KeyedProblem(name, reason))


def _is_bare_number(text: str) -> bool:
    """Whether a text is a number without a unit."""
    return text.replace(".", "", 1).isdigit()


def _with_cluster(problem: Problem, **changes: Any) -> Problem:
    return problem._replace(cluster=problem.cluster.but(**changes))


def node_size(cluster: ClusterSpec) -> int:
    """Most devices of one node; for a single node at least the device's usual node size."""
    own = cluster.devices_per_node
    return max(own, cluster.device.node_size) if cluster.nodes == 1 else own


def _several_nodes(cluster: ClusterSpec) -> str:
    return f"2x{cluster.devices_per_node}x{cluster.device.name}@400Gbps"


def needs_network(cluster: ClusterSpec) -> str:
    """The error message for a cluster of several nodes without a network."""
    return (
        f"more than one node needs a network; give --cluster "
        f"{cluster.nodes}x{cluster.devices_per_node}x{cluster.device.name}@400Gbps"
    )


def with_devices(cluster: ClusterSpec, devices: int) -> ClusterSpec:
    """The cluster with another number of devices, in full nodes.

    Raises SpecError if they do not fill nodes, or if several nodes have no network.
    """
    per_node = node_size(cluster)
    if devices < 1:
        raise _vary_error("devices", "must be at least 1")
    if devices <= per_node:
        return cluster.but(nodes=1, devices_per_node=devices)
    if devices % per_node:
        below = devices // per_node * per_node
        raise _vary_error(
            "devices",
            f"{devices:,} do not fill nodes of {per_node}; give {below:,} or {below + per_node:,}",
        )
    if cluster.network is None:
        raise _vary_error("devices", needs_network(cluster))
    return cluster.but(nodes=devices // per_node, devices_per_node=per_node)
