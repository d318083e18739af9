"""Train a model, from joining the other processes to the last save."""

from __future__ import annotations

import gc
import json
import os
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.utils import clip_grads_with_norm_

from shardwise.stacks.program.data import Vocabulary, micro_batches
from shardwise.stacks.program.divide import Exchange
from shardwise.stacks.program.foreign import vocabulary
from shardwise.stacks.program.loss import loss_sum
from shardwise.stacks.program.optimizer import (
    by_mesh,
    gradient_norm,
    learning_rate,
    make_optimizer,
)
from shardwise.stacks.program.parallel import build_model
from shardwise.stacks.program.settings import (
    ACCUMULATE,
    BACKEND,
    CLIP_NORM,
    CONTEXT,
    DEVICE,
    DIVIDED,
    FUSED,
    KIND,
    LOG_EVERY,
    MICRO_BATCH,
    NON_FINITE,
    OUTPUT,
    READS_VOCABULARY,
    REDUCES_LAST,
    REPLICATE,
    RESHARDS_LAST,
    SAVE_EVERY,
    SAVES,
    SCHEDULE,
    SEQ_LEN,
    SEQUENCE_PARALLEL,
    SEQUENCE_PARTS,
    SHARD,
    SKIPS_SYNC,
    STEPS,
    SYNCS_LAST,
    TENSOR,
    TENSOR_ACROSS_NODES,
    THREADS,
    WARMUP_STEPS,
)


def join() -> tuple[int, int]:
    """Join the other processes; return the rank and the number of processes."""
    if DEVICE == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group(BACKEND, device_id=device)
    else:
        dist.init_process_group(BACKEND)
        if THREADS > 0:
            torch.set_num_threads(THREADS)
        else:
            # The processes of a machine share its cores.
            local_world = int(os.environ["LOCAL_WORLD_SIZE"])
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))
    return dist.get_rank(), dist.get_world_size()


def make_lanes() -> DeviceMesh:
    """The mesh of processes by their data, part of a sequence and part of matrices."""
    data = REPLICATE * SHARD
    if TENSOR_ACROSS_NODES:
        shape, axes = (TENSOR, data, CONTEXT), ("tensor", "data", "context")
    else:
        shape, axes = (data, CONTEXT, TENSOR), ("data", "context", "tensor")
    return init_device_mesh(DEVICE, shape, mesh_dim_names=axes)


def save(model: nn.Module, optimizer: Any, step: int) -> None:
    if KIND == "single":
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, OUTPUT / f"step-{step}.pt")
    else:
        # Sharded: any number of ranks can load it.
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.save(state, checkpoint_id=OUTPUT / f"step-{step}")


def train() -> None:
    if KIND == "single":
        rank, world = 0, 1
        if DEVICE == "cpu":
            torch.set_num_threads(THREADS if THREADS > 0 else os.cpu_count() or 1)
    else:
        rank, world = join()
    model = build_model()
    optimizer = make_optimizer(model)
    if READS_VOCABULARY:
        Vocabulary.size = vocabulary(model)
    if DIVIDED:
        lanes = make_lanes()
        if CONTEXT > 1:
            Exchange.group = lanes["context"].get_group()
        batches = micro_batches(lanes["data"].get_local_rank(), lanes["data"].size())
    else:
        batches = micro_batches(rank, world)
    OUTPUT.mkdir(parents=True, exist_ok=True)
    log: Any = (OUTPUT / "metrics.jsonl").open("w", buffering=1) if rank == 0 else None
    # Gradients are averaged over ranks: the mean over all tokens of a step.
    share = SEQUENCE_PARTS / (ACCUMULATE * MICRO_BATCH * SEQ_LEN)
    losses = torch.zeros((), dtype=torch.float64, device=DEVICE)
    if FUSED and NON_FINITE == "stop":
        broken = torch.zeros((), device=DEVICE)
    steps, since = 0, time.perf_counter()

    for step in range(STEPS):
        loss = torch.zeros((), device=DEVICE)
        # Gradients of logits that are divided by vocabulary are computed inside too.
        with loss_parallel() if TENSOR > 1 else nullcontext():
            for number in range(ACCUMULATE):
                if SYNCS_LAST or REDUCES_LAST or RESHARDS_LAST or SKIPS_SYNC:
                    last = number == ACCUMULATE - 1
                if SYNCS_LAST:
                    model.set_requires_gradient_sync(last)
                if REDUCES_LAST:
                    model.set_requires_all_reduce(last)
                if RESHARDS_LAST:
                    model.set_reshard_after_backward(last)
                ids = next(batches).to(DEVICE, non_blocking=True)
                with model.no_sync() if SKIPS_SYNC and not last else nullcontext():
                    part = loss_sum(model, ids) * share
                    part.backward()
                loss += part.detach()
        norm = gradient_norm(model)
        if CLIP_NORM > 0 and TENSOR > 1 and not SEQUENCE_PARALLEL:
            for group in by_mesh(model):
                clip_grads_with_norm_(group, CLIP_NORM, norm)
        elif CLIP_NORM > 0:
            clip_grads_with_norm_(model.parameters(), CLIP_NORM, norm)
        if SCHEDULE != "constant" or WARMUP_STEPS > 0:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step)
        if FUSED:
            # The fused optimizer reads this flag on the device and skips the update if it is 1.
            bad = (~norm.isfinite()).float().to(DEVICE)
            if NON_FINITE == "stop":
                optimizer.found_inf = broken = torch.maximum(broken, bad)
            else:
                optimizer.found_inf = bad
            optimizer.step()
        elif norm.isfinite():
            optimizer.step()
        elif NON_FINITE == "stop":
            raise SystemExit("a gradient was not finite; its update was not applied")
        if KIND == "ddp":
            # Gradients are views of the buckets: set to None they would get a second copy.
            optimizer.zero_grad(set_to_none=False)
        else:
            optimizer.zero_grad()
        losses += loss
        steps += 1
        if LOG_EVERY == 1 or (step + 1) % LOG_EVERY == 0 or step in (0, STEPS - 1):
            if KIND != "single":
                dist.all_reduce(losses)
            if rank == 0:
                line = {
                    "step": step + 1,
                    # Reading it waits for the device, and the clock must not be read before.
                    "loss": losses.item() / world / steps,
                    "gradient_norm": norm.item(),
                    "learning_rate": optimizer.param_groups[0]["lr"],
                    "step_s": (time.perf_counter() - since) / steps,
                }
                log.write(json.dumps(line) + "\n")
                print(*(f"{key} {value:.6g}" for key, value in line.items()), flush=True)
            if FUSED and NON_FINITE == "stop" and broken:
                raise SystemExit("a gradient was not finite; its update was not applied")
            losses.zero_()
            steps, since = 0, time.perf_counter()
        if SAVES and SAVE_EVERY > 0 and (step + 1) % SAVE_EVERY == 0 and step + 1 < STEPS:
            save(model, optimizer, step + 1)

    if SAVES:
        save(model, optimizer, STEPS)


if __name__ == "__main__":
    train()
    if KIND != "single":
        # A model that outlives its process group can hang in the group's destructor.
        gc.collect()
        if DEVICE == "cpu":
            dist.barrier()  # lets threads release their last tensors
        dist.destroy_process_group()
