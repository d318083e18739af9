"""Strategies as numpy columns, so that one vectorised pass predicts many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwise.spec.dtype import DTYPE_BYTES
from shardwise.spec.strategy import Strategy

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.floating[Any]]
Bools = npt.NDArray[np.bool_]


@dataclass(kw_only=True, eq=False, repr=False)
class Configurations:
    """Columns of settings, one row per resolved strategy. All rows share the same model units."""

    # Devices that share one copy of the model states; devices of a context group count too.
    shard: Ints
    replicate: Ints
    context: Ints
    tensor: Ints
    # Devices among those that share the model states that divide the experts.
    expert: Ints
    # Distance in ranks between neighbours: of a shard or context group, of replicas, of a tensor
    # group.
    shard_stride: Ints
    replicate_stride: Ints
    tensor_stride: Ints
    micro_batch: Ints
    accumulate: Ints
    param_bytes: Ints
    reduce_bytes: Ints
    # Of parameters and gradients on the device; and of the weights that the optimizer updates. They
    # differ if it is offloaded.
    master_bytes: Ints
    update_bytes: Ints
    sharded: Bools
    ddp: Bools
    reshard_forward: Bools
    # Group size of an integer `reshard_after_forward`; 0 where it is a bool.
    reshard_group: Ints
    reshard_backward: Bools
    # Whether gradients are reduced over the shard axis, and over the replicate axis, on every
    # micro-batch; otherwise on the last one only.
    shard_sync_every: Bools
    replicate_sync_every: Bools
    prefetch: Ints
    forward_prefetch: Ints
    # Whether embedding and head are FSDP units of their own.
    split_root: Bools
    # Number of token chunks in which head and loss are computed; 1 for all at once.
    loss_chunks: Ints
    # Whether Liger's kernel computes head and loss, and whether that of Cut Cross-Entropy does.
    liger: Bools
    cut: Bools
    # Whether parameters with all states, the optimizer alone, and saved activations of blocks are
    # in host memory.
    offload: Bools
    offload_optimizer: Bools
    offload_activations: Bools
    # Share of blocks, counted from the first, that recompute everything: 1.0 for "full", 0.0 for
    # "none".
    full_recompute: Floats
    selective: Bools
    # Size of DDP's buckets; 0 for torch's default.
    bucket_bytes: Floats
    # Bytes per element of gradients that DDP rounds to 16 bits, and the rank of PowerSGD; 0 without
    # either.
    wire_bytes: Ints
    powersgd_rank: Ints

    @classmethod
    def of(cls, strategies: Sequence[Strategy]) -> Configurations:
        """Columns of strategies that `Strategy.resolve` has completed; ValueError otherwise."""
        for strategy in strategies:
            if strategy.grad_sync is None or strategy.shard is None:
                raise ValueError("strategies must be resolved against a cluster first")

        def bools(values: Sequence[bool]) -> Bools:
            return np.asarray(values, dtype=np.bool_)

        reshard = [s.reshard_after_forward for s in strategies]
        return cls(
            **_degrees(strategies),
            micro_batch=_ints([s.micro_batch for s in strategies]),
            accumulate=_ints([s.accumulate for s in strategies]),
            param_bytes=_ints([DTYPE_BYTES[s.param_dtype] for s in strategies]),
            # DDP reduces gradients in the dtype of its parameters.
            reduce_bytes=_ints(
                [
                    DTYPE_BYTES[s.kept_dtype if s.kind == "ddp" else s.reduce_dtype]
                    for s in strategies
                ]
            ),
            master_bytes=_ints([DTYPE_BYTES[s.kept_dtype] for s in strategies]),
            update_bytes=_ints([DTYPE_BYTES[s.master_dtype] for s in strategies]),
            sharded=bools([s.sharded for s in strategies]),
            ddp=bools([s.kind == "ddp" for s in strategies]),
            reshard_forward=bools([r is not False for r in reshard]),
            reshard_group=_ints([0 if isinstance(r, bool) or r is None else r for r in reshard]),
            reshard_backward=bools([bool(s.reshard_after_backward) for s in strategies]),
            shard_sync_every=bools([s.grad_sync != "last" for s in strategies]),
            replicate_sync_every=bools([s.grad_sync == "every" for s in strategies]),
            prefetch=_ints([s.prefetch for s in strategies]),
            forward_prefetch=_ints([s.forward_prefetch for s in strategies]),
            split_root=bools([s.split_root for s in strategies]),
            loss_chunks=_ints([s.loss_chunks if s.loss == "chunked" else 1 for s in strategies]),
            liger=bools([s.loss == "fused" and s.loss_kernel == "liger" for s in strategies]),
            cut=bools([s.loss == "fused" and s.loss_kernel != "liger" for s in strategies]),
            offload=bools([s.offloads("parameters") for s in strategies]),
            offload_optimizer=bools([s.offloads("optimizer") for s in strategies]),
            offload_activations=bools([s.offloads("activations") for s in strategies]),
            full_recompute=np.asarray(
                [s.full_recompute_share for s in strategies], dtype=np.float64
            ),
            selective=bools([s.recompute == "selective" for s in strategies]),
            bucket_bytes=np.asarray([(s.ddp_bucket_mib or 0.0) * 2**20 for s in strategies]),
            wire_bytes=_ints([2 if s.compress in ("bf16", "fp16") else 0 for s in strategies]),
            powersgd_rank=_ints(
                [s.powersgd_rank if s.compress == "powersgd" else 0 for s in strategies]
            ),
        )

    def __len__(self) -> int:
        return len(self.shard)

    @cached_property
    def expert_shard(self) -> Ints:
        """Devices that hold the same experts, and share one copy of their states."""
        return self.shard // self.expert

    def group(self, axis: str) -> tuple[Ints, Ints]:
        """Devices of a group along an axis, and the distance in ranks between neighbours."""
        return self._groups[axis]

    @cached_property
    def _groups(self) -> dict[str, tuple[Ints, Ints]]:
        # The same objects each time: what is computed of a group is kept by its identity.
        return {
            "replicate": (self.replicate, self.replicate_stride),
            "shard": (self.shard, self.shard_stride),
            "reshard": (
                np.where(self.reshard_group > 0, self.reshard_group, self.shard),
                self.shard_stride,
            ),
            "context": (self.context, self.shard_stride),
            "tensor": (self.tensor, self.tensor_stride),
            "expert": (self.expert, self.shard_stride),
            "expert_shard": (self.expert_shard, self.shard_stride * self.expert),
        }

    @property
    def data_parallel(self) -> Ints:
        """Number of data-parallel ranks: devices or context groups that see different sequences."""
        return self.replicate * self.shard // self.context

    def take(self, rows: Ints) -> Configurations:
        """The rows with these indices, in this order; an index may repeat."""
        columns = {f.name: getattr(self, f.name)[rows] for f in fields(self)}
        return Configurations(**columns)


def _ints(values: Sequence[int]) -> Ints:
    """A column of integers."""
    return np.asarray(values, dtype=np.int64)


def _degrees(strategies: Sequence[Strategy]) -> dict[str, Ints]:
    """The columns of degrees of parallelism, and of distances in ranks."""
    return {
        "shard": _ints([s.mesh.states for s in strategies]),
        "replicate": _ints([s.mesh.replicate for s in strategies]),
        "context": _ints([s.context for s in strategies]),
        "tensor": _ints([s.tensor for s in strategies]),
        "expert": _ints([s.expert for s in strategies]),
        "shard_stride": _ints([s.stride("context") for s in strategies]),
        "replicate_stride": _ints([s.stride("replicate") for s in strategies]),
        "tensor_stride": _ints([s.stride("tensor") for s in strategies]),
    }
