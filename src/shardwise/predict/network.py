"""Seconds of a collective: bytes over what the slowest link gives, and latency.

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
    """`size` ranks, `in_node` of them in each node; `span` devices from the first to the last."""

    size: Ints
    in_node: Ints
    span: Ints

    @property
    def nodes(self) -> Floats:
        return np.maximum(1.0, self.size / self.in_node)


def ring_s(
    message: Floats, size: Ints, h: Hardware, k: Coefficients, stride: Ints | int = 1
) -> Floats:
    """All-gather or reduce-scatter of a whole group's message.

    Neighbours lie `stride` devices apart: a group fills every node that it is in.
    """
    group = _spread(size, stride, h)
    moved = message * (size - 1) / size
    if h.measured:
        return moved / _measured(group, h.measured.ring, h)
    return moved / _bandwidth(group, h.link_bandwidth, h, k) + _ring_latency(group, k)


def all_reduce_s(
    message: Floats, replicas: Ints, stride: Ints, h: Hardware, k: Coefficients
) -> Floats:
    """Across replicas, each device its own `message`: by ring or by tree, whichever is faster.

    Replicas lie `stride` devices apart: several to a node, or one in every few.
    """
    group = _spread(replicas, stride, h)
    moved = 2.0 * message * (replicas - 1) / replicas
    if h.measured:
        return moved / _measured(group, h.measured.all_reduce, h)
    link = h.link_bandwidth * k.reduce_speedup
    ring = moved / _bandwidth(group, link, h, k) + 2.0 * _ring_latency(group, k)
    if h.on_cpu:
        return ring
    share = k.tree_efficiency * np.maximum(1.0, group.nodes / 2.0) ** -k.tree_falloff
    tree = moved / _bandwidth(group, link, h, k, share) + 2.0 * _tree_latency(group, k)
    return np.minimum(ring, tree)


def all_to_all_s(
    message: Floats, size: Ints, h: Hardware, k: Coefficients, stride: Ints | int = 1
) -> Floats:
    """Every device sends each other one a part of its own `message`.

    What stays in a node and what leaves it go over different links at the same time.
    """
    group = _spread(size, stride, h)
    if h.measured:
        return message * (size - 1) / size / _measured(group, h.measured.ring, h)
    near = np.minimum(size, group.in_node)
    inside = message * (near - 1) / size / (h.link_bandwidth * k.link_efficiency)
    alone = group._replace(in_node=np.ones_like(group.size))
    beyond = message * (size - near) / size / _bandwidth(alone, h.link_bandwidth, h, k)
    seconds: Floats = np.maximum(inside, beyond) + _ring_latency(group, k)
    return seconds


def _spread(size: Ints, stride: Ints | int, h: Hardware) -> Group:
    in_node = np.maximum(1, h.devices_per_node // np.asarray(stride))
    return Group(size, np.broadcast_to(in_node, size.shape), size * stride)


def _bandwidth(
    group: Group,
    link: float | Floats,
    h: Hardware,
    k: Coefficients,
    share: float | Floats = 1.0,
) -> Floats:
    """Bytes per second of the slowest link; of that between nodes, a `share`.

    Members in one node send to the next node together, each over its own port.
    """
    inside = link * k.link_efficiency
    between = h.network_bandwidth * group.in_node * k.network_efficiency * share
    outside_pod = group.span > h.pod_nodes * h.devices_per_node
    between = np.where(outside_pod, between / h.oversubscription, between)
    return np.where(group.size > group.in_node, np.minimum(inside, between), inside)


def _measured(group: Group, bandwidths: tuple[float, ...], h: Hardware) -> Floats:
    """Interpolated between the measured numbers of nodes; ports are shared by a node's groups."""
    assert h.measured is not None
    nodes = np.log2(np.asarray(h.measured.nodes))
    found = np.exp(np.interp(np.log2(group.nodes), nodes, np.log(bandwidths)))
    share = np.minimum(group.in_node, h.devices_per_node) / h.devices_per_node
    return found * np.where(group.nodes > 1, share, 1.0)


def _ring_latency(group: Group, k: Coefficients) -> Floats:
    """Hops through a node, and one from each node to the next."""
    return _latency_in_node(group, k) + k.network_latency_s * (group.nodes - 1.0)


def _tree_latency(group: Group, k: Coefficients) -> Floats:
    """A chain inside each node, and a level per doubling of nodes."""
    return _latency_in_node(group, k) + k.network_latency_s * np.log2(group.nodes)


def _latency_in_node(group: Group, k: Coefficients) -> Floats:
    return k.hop_latency_s * (np.minimum(group.size, group.in_node) - 1.0)
