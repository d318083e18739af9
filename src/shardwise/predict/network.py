"""Seconds of a collective: a latency per hop, and bytes over what the slowest link gives."""

from __future__ import annotations

import numpy as np

from shardwise.predict.configurations import Floats, Ints
from shardwise.predict.rates import Coefficients, Hardware


def ring_s(message: Floats, size: Ints, h: Hardware, k: Coefficients) -> Floats:
    """All-gather or reduce-scatter of a whole group's message; a group fills node after node."""
    in_node = np.full_like(size, h.devices_per_node)
    wire = message * (size - 1) / size / _bus_bandwidth(size, in_node, size, h, k)
    return wire + _latency(size, in_node, h, k)


def all_reduce_s(
    message: Floats, replicas: Ints, stride: Ints, h: Hardware, k: Coefficients
) -> Floats:
    """Across replicas, each device its own `message`.

    Replicas lie `stride` devices apart: several to a node, or one in every few.
    """
    in_node = np.maximum(1, h.devices_per_node // stride)
    bandwidth = _bus_bandwidth(replicas, in_node, replicas * stride, h, k, k.reduce_speedup)
    wire = 2.0 * message * (replicas - 1) / replicas / bandwidth
    return wire + 2.0 * _latency(replicas, in_node, h, k)


def _bus_bandwidth(
    size: Ints, in_node: Ints, span: Ints, h: Hardware, k: Coefficients, speedup: float = 1.0
) -> Floats:
    """Bytes per second of a ring: its slowest link.

    Members in one node send to the next node together, each over its own port. `span` devices lie
    between the first and the last member.
    """
    inside = h.link_bandwidth * k.link_efficiency * speedup
    between = h.network_bandwidth * in_node * k.network_efficiency
    between = np.where(
        span > h.pod_nodes * h.devices_per_node, between / h.oversubscription, between
    )
    return np.where(size > in_node, np.minimum(inside, between), inside)


def _latency(size: Ints, in_node: Ints, h: Hardware, k: Coefficients) -> Floats:
    nodes = np.maximum(1.0, size / in_node)
    within = np.minimum(size, in_node) - 1.0
    return k.hop_latency_s * within + k.network_latency_s * np.log2(nodes)
