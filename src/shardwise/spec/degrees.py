"""The shard and replicate degrees of a strategy on a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.spec.mesh import Mesh
from shardwise.spec.record import SpecError

if TYPE_CHECKING:
    from shardwise.spec.strategy import Strategy


def degrees_on(strategy: Strategy, devices: int, node_size: int) -> tuple[int, int]:
    """The shard and replicate degrees on a cluster; SpecError if degrees do not fit it."""
    whole, inner = devices, strategy.mesh.inner
    if devices % inner:
        raise SpecError(
            f"strategy: {_product(strategy.mesh)} does not divide {devices} devices; "
            "choose degrees that do"
        )
    devices, node_size = devices // inner, max(1, node_size // inner)
    if strategy.kind in ("single", "ddp"):
        if strategy.kind == "single" and devices != 1:
            raise SpecError(
                f"strategy: 'single' uses one device but the cluster has {devices}; "
                "choose ddp, zero2, zero3 or hsdp, or a cluster of one device"
            )
        shard, replicate = 1, strategy.replicate or devices
    elif strategy.within_node:
        shard = min(node_size, devices)
        replicate = strategy.replicate or devices // shard
    else:
        shard = strategy.shard or devices // (strategy.replicate or 1) or 1
        replicate = strategy.replicate or devices // shard or 1
    if shard * replicate != devices:
        if strategy.replicate is None and strategy.shard is not None:
            possible = [n for n in range(1, devices + 1) if devices % n == 0]
            near = sorted(sorted(possible, key=lambda n: abs(n - shard))[:4])
            listed = f"{', '.join(map(str, near[:-1]))} or {near[-1]}" if near[1:] else near[0]
            shared = f" that {_product(strategy.mesh)} leaves of {whole}" if inner > 1 else ""
            count = f"{devices} device{'s' if devices > 1 else ''}{shared}"
            raise SpecError(f"strategy: groups of {shard} do not divide {count}; use {listed}")
        product = f"shard {shard} x replicate {replicate}"
        if inner > 1:
            product += f" x {_product(strategy.mesh)}"
        raise SpecError(
            f"strategy: {product} = {shard * replicate * inner} devices, "
            f"but the cluster has {whole}; the degrees must multiply to that"
        )
    return shard, replicate


def _product(mesh: Mesh) -> str:
    """Context and tensor degrees as a product in words: "context 2 x tensor 8"."""
    return " x ".join(mesh.inner_degrees)
