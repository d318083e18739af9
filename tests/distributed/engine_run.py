"""A training step on the engine, watched: collectives, state bytes and peak memory.

Started by torchrun with a JSON list of cases; rank 0 prints one JSON line per case.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwise.engine.counter import CollectiveCounter
from shardwise.engine.ledger import LiveBytes
from shardwise.engine.mesh import join, leave
from shardwise.engine.parallelize import parallelize
from shardwise.engine.sync import micro_batch
from shardwise.spec import ModelSpec, Strategy
from shardwise.train.batches import MicroBatch
from shardwise.train.loop import logits_of, loss_sum
from shardwise.train.optimizer import clear_gradients
from tests.units.reduced import build


def step(module: torch.nn.Module, optimizer: Any, ids: torch.Tensor, strategy: Strategy) -> None:
    for index in range(strategy.accumulate):
        with micro_batch(module, last=index == strategy.accumulate - 1):
            loss_sum(logits_of(module), MicroBatch(ids, ids), ids.device).backward()
    optimizer.step()
    clear_gradients(module, optimizer)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def any_rank(value: bool) -> bool:
    told = torch.tensor(float(value))
    dist.all_reduce(told, dist.ReduceOp.MAX)
    return bool(told)


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    spec = ModelSpec.model_validate(case["model"])
    strategy = Strategy.model_validate(case["strategy"])
    torch.manual_seed(0)
    module = parallelize(build(spec, device="cpu", attention="sdpa"), strategy)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    ids = torch.randint(0, spec.vocab, (strategy.micro_batch, case["seq_len"]))
    for _ in range(2):  # lazy initialisation, optimizer states, rebuilt buckets
        step(module, optimizer, ids, strategy)
    with CollectiveCounter() as counter:
        step(module, optimizer, ids, strategy)
    states = [
        local(v)
        for state in optimizer.state.values()
        for v in state.values()
        if isinstance(v, torch.Tensor) and v.numel() > 1
    ]
    result: dict[str, Any] = {
        "collectives": {f"{op}/{size}": list(n) for (op, size), n in counter.found.items()},
        "parameter_bytes": sum(local(p).nbytes for p in module.parameters()),
        "optimizer_bytes": sum(s.nbytes for s in states),
    }
    if case.get("peak"):
        gc.collect()
        with LiveBytes() as live:
            step(module, optimizer, ids, strategy)  # meets DDP's buckets, which outlive steps
            peaks: list[int] = []
            # Gloo's threads let go of their tensors a little late when the machine is busy, which
            # can only add to a peak.
            while len(peaks) < 3 and any_rank(len(set(peaks)) == len(peaks)):
                live.reset()
                step(module, optimizer, ids, strategy)
                peaks.append(live.peak_bytes)
        result["peak_bytes"] = min(peaks)
    return result


def main() -> None:
    torch.set_num_threads(1)
    join(torch.device("cpu"))
    # What the imports left need not be searched again in every case.
    gc.freeze()
    for case in json.loads(Path(sys.argv[1]).read_text()):
        result = run_case(case)
        gc.collect()
        if dist.get_rank() == 0:
            print("RESULT " + json.dumps(result), flush=True)
    gc.unfreeze()
    leave()


if __name__ == "__main__":
    main()
