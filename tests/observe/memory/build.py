"""Snapshots made by hand: every size in them is chosen, so that every answer is arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwise.observe.memory.read import memories_of
from shardwise.observe.memory.record import Memory
from shardwise.observe.memory.snapshot import snapshot_from

MIB = 1 << 20
MODULE = "/env/lib/python3.12/site-packages/torch/nn/modules/module.py"


def frame(file: str, line: int, name: str) -> dict[str, Any]:
    return {"filename": file, "line": line, "name": name}


FORWARD = [
    frame("functional.cpp", 0, "at::native::linear"),
    frame("/env/lib/python3.12/site-packages/torch/nn/functional.py", 50, "linear"),
    frame(MODULE, 1776, "_wrapped_call_impl"),
    frame("/home/me/model.py", 21, "forward"),
    frame("/home/me/train.py", 9, "main"),
]
BACKWARD = [
    frame("??", 0, "torch::autograd::generated::MulBackward0::apply(std::vector<at::Tensor>&&)"),
    frame("??", 0, "torch::autograd::Engine::evaluate_function(std::shared_ptr<GraphTask>&)"),
]
OPTIMIZER = [
    frame("/env/lib/python3.12/site-packages/torch/optim/adamw.py", 70, "_init_group"),
    frame("/home/me/train.py", 12, "main"),
]
PARAMETERS = [
    frame(MODULE, 900, "convert"),
    frame(MODULE, 800, "_apply"),
    frame("/home/me/train.py", 4, "main"),
]
GATHER = [
    frame("/env/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 80,
          "foreach_all_gather"),
    frame("/home/me/model.py", 21, "forward"),
]  # fmt: skip
PLAIN = [frame("/home/me/train.py", 3, "main")]
KEPT = [frame("/home/me/train.py", 33, "log"), frame("/home/me/train.py", 9, "main")]
STEP_US = 1000


def event(
    action: str, addr: int, size: int, frames: Any = PLAIN, time: int = 0, **more: Any
) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": time,
            "frames": frames, **more}  # fmt: skip


def block(
    address: int, size: int, state: str = "active_allocated", frames: Any = PLAIN, **more: Any
) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state,
            "frames": frames, **more}  # fmt: skip


def segment(blocks: list[dict[str, Any]], device: int = 0, kind: str = "large") -> dict[str, Any]:
    return {
        "device": device,
        "address": blocks[0]["address"],
        "total_size": sum(one["size"] for one in blocks),
        "segment_type": kind,
        "blocks": blocks,
    }


def snapshot(
    segments: list[dict[str, Any]], *traces: list[dict[str, Any]], **more: Any
) -> dict[str, Any]:
    return {
        "segments": segments,
        "device_traces": list(traces),
        "allocator_settings": {"expandable_segments": False},
        "external_annotations": [],
        **more,
    }


def training(
    steps: int,
    *,
    leak: int = 0,
    optimizer: bool = False,
    names: bool = False,
    notes: bool = False,
    first_only: bool = False,
) -> dict[str, Any]:
    """`steps` of forward (4 and 6 MiB), backward (5 MiB, all freed), and `leak` bytes that stay."""
    events: list[dict[str, Any]] = []
    marks, blocks = [], []
    fresh = 0x1_0000_0000
    for step in range(steps):
        time = step * STEP_US
        more = {"user_metadata": f"step {step}"} if notes else {}
        marks.append({"name": f"ProfilerStep#{step}", "stage": "START", "time_us": time})
        marks.append({"name": f"ProfilerStep#{step}", "stage": "END", "time_us": time + 900})
        events.append(event("alloc", 0x1000, 4 * MIB, FORWARD, time + 1, **more))
        events.append(event("alloc", 0x2000, 6 * MIB, FORWARD, time + 2, **more))
        if leak and (step == 0 or not first_only):
            fresh += leak
            events.append(event("alloc", fresh, leak, KEPT, time + 3, **more))
            blocks.append(block(fresh, leak, frames=KEPT))
        events.append(event("alloc", 0x3000, 5 * MIB, BACKWARD, time + 4, **more))
        for address, size in ((0x2000, 6), (0x1000, 4), (0x3000, 5)):
            events.append(event("free_requested", address, size * MIB, BACKWARD, time + 5))
        if optimizer:
            events.append(event("alloc", 0x4000, 1 * MIB, OPTIMIZER, time + 6))
            events.append(event("free_requested", 0x4000, 1 * MIB, OPTIMIZER, time + 7))
    free = block(0x1000, 100 * MIB, "inactive")
    return snapshot([segment([free, *blocks])], events, external_annotations=marks if names else [])


def read(data: Any) -> tuple[Memory, ...]:
    return memories_of(snapshot_from(data, Path("snapshot.pickle")))


def read_one(data: Any) -> Memory:
    (memory,) = read(data)
    return memory
