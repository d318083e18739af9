"""Seconds of a collective: bytes over the bandwidth of the slowest link, plus latency.

A ring passes each piece of a message from node to node, so its latency grows with their number. A
tree, which NCCL may take for an all-reduce, has a latency that grows with the logarithm of the
nodes. Both make the effective bandwidth fall with the nodes spanned, the more the smaller the
message. The form is the one that follows measured collectives best: benchmarks/collectives.py.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardwise.predict.configurations import Floats, Ints
from shardwise.predict.rates import Coefficients, Hardware


class Group(NamedTuple):
    """A process group: `size` ranks, `in_node` per node, spread over `span` consecutive ranks."""

    size: Ints
    in_node: Ints
    span: Ints

    @property
    def nodes(self) -> Floats:
        return np.maximum(1.0, self.size / self.in_node)


class Ring(NamedTuple):
    """Bandwidth (bytes/s) and latency (s) of ring all-gathers or reduce-scatters in a group."""

    size: Ints
    bandwidth: Floats
    latency: Floats | float

    def seconds(self, message: Floats) -> Floats:
        """Seconds of one call whose gathered output (or scatter input) is `message` bytes."""
        return message * (self.size - 1) / self.size / self.bandwidth + self.latency


class AllReduce(NamedTuple):
    """Bandwidth (bytes/s) and latency (s) of an all-reduce across replicas, by ring and by tree."""

    replicas: Ints
    ring_bandwidth: Floats
    ring_latency: Floats | float
    # None where no tree is used.
    tree_bandwidth: Floats | None
    tree_latency: Floats | float

    def seconds(self, message: Floats) -> Floats:
        """Seconds of one call on `message` bytes per device: by ring or tree, the faster."""
        moved = 2.0 * message * (self.replicas - 1) / self.replicas
        ring = moved / self.ring_bandwidth + self.ring_latency
        if self.tree_bandwidth is None:
            return ring
        return np.minimum(ring, moved / self.tree_bandwidth + self.tree_latency)


def ring(size: Ints, h: Hardware, k: Coefficients, stride: Ints | int = 1) -> Ring:
    """The ring all-gather or reduce-scatter of groups whose neighbours are `stride` ranks apart."""
    group = _spread(size, stride, h)
    if h.measured:
        return Ring(size, _measured(group, h.measured.ring, h), 0.0)
    return Ring(size, _bandwidth(group, h.link_bandwidth, h, k), _ring_latency(group, k))


def all_reduce(replicas: Ints, stride: Ints, h: Hardware, k: Coefficients) -> AllReduce:
    """The all-reduce across replicas that are `stride` ranks apart."""
    group = _spread(replicas, stride, h)
    if h.measured:
        return AllReduce(replicas, _measured(group, h.measured.all_reduce, h), 0.0, None, 0.0)
    link = h.link_bandwidth * k.reduce_speedup
    bandwidth, latency = _bandwidth(group, link, h, k), 2.0 * _ring_latency(group, k)
    if h.on_cpu:
        return AllReduce(replicas, bandwidth, latency, None, 0.0)
    share = k.tree_efficiency * np.maximum(1.0, group.nodes / 2.0) ** -k.tree_falloff
    through_tree = _bandwidth(group, link, h, k, share)
    return AllReduce(replicas, bandwidth, latency, through_tree, 2.0 * _tree_latency(group, k))


def ring_s(
    message: Floats, size: Ints, h: Hardware, k: Coefficients, stride: Ints | int = 1
) -> Floats:
    """Seconds of an all-gather with `message` bytes of output (or reduce-scatter of input)."""
    return ring(size, h, k, stride).seconds(message)


def all_reduce_s(
    message: Floats, replicas: Ints, stride: Ints, h: Hardware, k: Coefficients
) -> Floats:
    """Seconds of an all-reduce across replicas of `message` bytes on each device."""
    return all_reduce(replicas, stride, h, k).seconds(message)


def all_to_all_s(
    message: Floats, size: Ints, h: Hardware, k: Coefficients, stride: Ints | int = 1
) -> Floats:
    """Seconds of an all-to-all of `message` bytes on each device.

    Traffic inside a node and between nodes goes over different links at the same time.
    """
    group = _spread(size, stride, h)
    if h.measured:
        return message * (size - 1) / size / _measured(group, h.measured.ring, h)
    k = k.of_all_to_alls
    near = np.minimum(size, group.in_node)
    inside = message * (near - 1) / size / (h.link_bandwidth * k.link_efficiency)
    alone = group._replace(in_node=np.ones_like(group.size))
    beyond = message * (size - near) / size / _bandwidth(alone, h.link_bandwidth, h, k)
    seconds: Floats = np.maximum(inside, beyond) + _ring_latency(group, k)
    return seconds


def _spread(size: Ints, stride: Ints | int, h: Hardware) -> Group:
    """The group of `size` ranks that are `stride` ranks apart."""
    in_node = np.maximum(1, h.devices_per_node // np.asarray(stride))
    return Group(size, np.broadcast_to(in_node, size.shape), size * stride)


def _bandwidth(
    group: Group,
    link: float | Floats,
    h: Hardware,
    k: Coefficients,
    share: float | Floats = 1.0,
) -> Floats:
    """Bytes per second of a group's slowest link; `share` scales the network between nodes.

    Members in one node send to the next node at the same time, each over its own port.
    """
    inside = link * k.link_efficiency
    between = h.network_bandwidth * group.in_node * k.network_efficiency * share
    outside_pod = group.span > h.pod_nodes * h.devices_per_node
    between = np.where(outside_pod, between / h.oversubscription, between)
    return np.where(group.size > group.in_node, np.minimum(inside, between), inside)


def _measured(group: Group, bandwidths: tuple[float, ...], h: Hardware) -> Floats:
    """Bytes per second of a group, interpolated between measured numbers of nodes.

    The groups of a node share its ports.
    """
    assert h.measured is not None
    nodes = np.log2(np.asarray(h.measured.nodes))
    found = np.exp(np.interp(np.log2(group.nodes), nodes, np.log(bandwidths)))
    share = np.minimum(group.in_node, h.devices_per_node) / h.devices_per_node
    return found * np.where(group.nodes > 1, share, 1.0)


def _ring_latency(group: Group, k: Coefficients) -> Floats:
    """Seconds of latency of a ring: hops through a node, and one hop from each node to the next."""
    return _latency_in_node(group, k) + k.network_latency_s * (group.nodes - 1.0)


def _tree_latency(group: Group, k: Coefficients) -> Floats:
    """Seconds of latency of a tree: a chain inside each node, and a level per doubling of nodes."""
    return _latency_in_node(group, k) + k.network_latency_s * np.log2(group.nodes)


def _latency_in_node(group: Group, k: Coefficients) -> Floats:
    """Seconds of the hops between a group's members in one node."""
    return k.hop_latency_s * (np.minimum(group.size, group.in_node) - 1.0)
