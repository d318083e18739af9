"""A training step written by hand on PyTorch's engine, watched: collectives and peak memory.

Started by torchrun with a JSON list of cases; rank 0 prints one JSON line per case.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import weakref
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from shardwise.spec import ModelSpec, Strategy
from shardwise.units.blocks import find_blocks
from tests.units.reduced import build

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class CountCollectives(TorchDispatchMode):
    """Calls and bytes by operation and group size; `bytes` is the whole group's message."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        c10d = torch.ops.c10d
        message = {
            c10d._allgather_base_.default: ("all_gather", lambda: args[0]),
            c10d._reduce_scatter_base_.default: ("reduce_scatter", lambda: args[1]),
            c10d.allreduce_.default: ("all_reduce", lambda: args[0][0]),
        }.get(func)
        if message is not None:
            group = next(a for a in args if isinstance(a, torch.ScriptObject))
            size = dist.ProcessGroup.unbox(group).size()
            entry = self.found.setdefault(f"{message[0]}/{size}", [0, 0])
            entry[0] += 1
            entry[1] += message[1]().nbytes
        return func(*args, **(kwargs or {}))


def shard(module: torch.nn.Module, strategy: Strategy) -> torch.nn.Module:
    blocks = list(find_blocks(module).values())
    if strategy.recompute == "full":
        for block in blocks:
            forward = block.forward
            block.forward = lambda *a, f=forward, **k: checkpoint(f, *a, use_reentrant=False, **k)
    if strategy.kind == "ddp":
        return DistributedDataParallel(
            module, gradient_as_bucket_view=True, forward_sync_buffers=False
        )
    assert strategy.shard is not None
    assert strategy.replicate is not None
    mesh = (
        init_device_mesh("cpu", (strategy.replicate, strategy.shard), mesh_dim_names=("r", "s"))
        if strategy.hybrid
        else init_device_mesh("cpu", (strategy.shard,))
    )
    policy = MixedPrecisionPolicy()
    if strategy.param_dtype != "fp32" or strategy.reduce_dtype != "fp32":
        policy = MixedPrecisionPolicy(
            param_dtype=DTYPES[strategy.param_dtype], reduce_dtype=DTYPES[strategy.reduce_dtype]
        )
    after_forward = strategy.reshard_after_forward
    for start in range(0, len(blocks), strategy.blocks_per_unit):
        group = blocks[start : start + strategy.blocks_per_unit]
        fully_shard(
            group if len(group) > 1 else group[0],
            mesh=mesh,
            mp_policy=policy,
            reshard_after_forward=after_forward,
        )
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    return module


def step(module: torch.nn.Module, optimizer: Any, ids: torch.Tensor, strategy: Strategy) -> None:
    for index in range(strategy.accumulate):
        last = index == strategy.accumulate - 1
        if strategy.sharded:
            module.set_requires_gradient_sync(last or strategy.grad_sync != "last")
            module.set_requires_all_reduce(last or strategy.grad_sync == "every")
            module.set_reshard_after_backward(last or strategy.reshard_after_backward)
            module(input_ids=ids, labels=ids).loss.backward()
        elif last or strategy.grad_sync == "every":
            module(input_ids=ids, labels=ids).loss.backward()
        else:
            with module.no_sync():
                module(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class LiveBytes(TorchDispatchMode):
    """The sum of tensors alive, after every operation, above those that rest between steps.

    FSDP frees and refills the storages of gathered parameters in place, so they are known from
    the start and the size of every storage is read anew each time. A storage that first shows up
    in a view was made out of sight: it is Gloo's own copy and is not counted.
    """

    def __init__(self, resting: list[torch.Tensor]) -> None:
        super().__init__()
        self.resting = {t.untyped_storage()._cdata for t in resting}
        self.alive: dict[int, Any] = {}
        self.foreign: dict[int, Any] = {}
        self.peak = 0
        self._follow([o for o in gc.get_objects() if isinstance(o, torch.Tensor)], self.alive)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        book = self.foreign if func.is_view else self.alive
        self._follow(tree_leaves((args, kwargs, out)), book)
        storages = [reference() for reference in list(self.alive.values())]
        self.peak = max(self.peak, sum(s.nbytes() for s in storages if s is not None))
        return out

    def _follow(self, leaves: list[Any], book: dict[int, Any]) -> None:
        for tensor in leaves:
            if isinstance(tensor, torch.Tensor) and not isinstance(tensor, DTensor):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self.resting and key not in self.alive and key not in self.foreign:
                    book[key] = weakref.ref(storage, lambda _, k=key: book.pop(k, None))


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    spec = ModelSpec.model_validate(case["model"])
    strategy = Strategy.model_validate(case["strategy"])
    torch.manual_seed(0)
    module = shard(build(spec, device="cpu", attention="sdpa"), strategy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(0, spec.vocab, (strategy.micro_batch, case["seq_len"]))
    for _ in range(2):  # lazy initialisation, optimizer states, rebuilt buckets
        step(module, optimizer, ids, strategy)
    with CountCollectives() as counter:
        step(module, optimizer, ids, strategy)
    parameters = [local(p) for p in module.parameters()]
    states = [
        local(v)
        for state in optimizer.state.values()
        for v in state.values()
        if isinstance(v, torch.Tensor) and v.numel() > 1
    ]
    result: dict[str, Any] = {
        "collectives": counter.found,
        "parameter_bytes": sum(p.nbytes for p in parameters),
        "optimizer_bytes": sum(s.nbytes for s in states),
    }
    if case.get("peak"):
        gc.collect()
        with LiveBytes([*parameters, *states]) as live:
            step(module, optimizer, ids, strategy)  # meets DDP's buckets, which outlive steps
            live.peak = 0
            step(module, optimizer, ids, strategy)
        resting = result["parameter_bytes"] + result["optimizer_bytes"]
        result["peak_bytes"] = resting + live.peak
    return result


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in json.loads(Path(sys.argv[1]).read_text()):
        result = run_case(case)
        gc.collect()
        if dist.get_rank() == 0:
            print("RESULT " + json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
