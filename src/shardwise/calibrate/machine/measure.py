"""Everything about the devices and links that are here, in one go. Every process calls this."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch

from shardwise.calibrate.machine.collectives import Collective, groups, measure_collectives
from shardwise.calibrate.machine.compute import Compute, measure_compute
from shardwise.calibrate.machine.contention import measure_contention
from shardwise.calibrate.machine.timing import Step
from shardwise.engine.mesh import host_memory, join, leave, local_device, processes_per_node, world


class Machine(NamedTuple):
    """What was measured, and on what."""

    device: str
    backend: str
    memory: int
    nodes: int
    devices_per_node: int
    compute: Compute
    collectives: list[Collective]
    contention: float | None


def measure_machine(step: Step) -> Machine:
    """Of the processes there are; `step` is told what comes next."""
    # What the engine itself calls; torch renames it some day.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    device = local_device()
    join(device)
    _, size = world()
    per_node = processes_per_node()
    compute = measure_compute(device, step)
    collectives: list[Collective] = []
    contention = None
    if size > 1:
        made = groups()
        collectives = list(measure_collectives(device, made, step))
        step("compute beside communication")
        contention = measure_contention(device, made[-1])
    found = Machine(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        backend=("nccl" if device.type == "cuda" else "gloo") if size > 1 else "",
        memory=_memory(device, per_node),
        nodes=size // per_node,
        devices_per_node=per_node,
        compute=compute,
        collectives=collectives,
        contention=contention,
    )
    leave()
    return found


def _memory(device: torch.device, processes: int) -> int:
    """Bytes each process can hope for."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return host_memory(processes)
