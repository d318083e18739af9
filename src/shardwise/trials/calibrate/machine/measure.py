"""Measure the devices and links of all current processes. Every process calls this."""

from __future__ import annotations

import warnings
from typing import NamedTuple

from shardwise.engine.mesh import join, leave, processes_per_node, world
from shardwise.pytorch.device import (
    accelerator_memory,
    communicator,
    device_name,
    is_accelerator,
    local_device,
)
from shardwise.spec.catalogue import host_memory
from shardwise.trials.calibrate.machine.collectives import Collective, groups, measure_collectives
from shardwise.trials.calibrate.machine.compute import Compute, measure_compute
from shardwise.trials.calibrate.machine.contention import measure_contention
from shardwise.trials.calibrate.machine.exchange import measure_exchange
from shardwise.trials.calibrate.machine.quality import busy_share
from shardwise.trials.calibrate.machine.timing import Step


class Machine(NamedTuple):
    """The measurements of devices and links, and what they are.

    `memory` is in bytes of one device. `contention` is None with one process.
    """

    device: str
    backend: str
    memory: int
    nodes: int
    devices_per_node: int
    compute: Compute
    collectives: list[Collective]
    contention: float | None
    # Seconds of a tiny collective inside a block; None on GPUs, where compute hides it.
    exchange_s: float | None = None
    # Share (0 to 1) of the cores that other processes used before.
    load: float = 0.0


def measure_machine(step: Step) -> Machine:
    """Measure the devices of all processes and their links; `step` is called before each part."""
    # The engine calls functions that torch has announced to rename.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    device = local_device()
    join(device)
    _, size = world()
    per_node = processes_per_node()
    step("load")
    load = busy_share()
    compute = measure_compute(device, step)
    collectives: list[Collective] = []
    contention = exchange = None
    if size > 1:
        made = groups()
        collectives = list(measure_collectives(device, made, step))
        step("compute beside communication")
        contention = measure_contention(device, made[-1])
        if not is_accelerator(device):
            step("tensor parallelism")
            exchange = measure_exchange(device, made[0])
    found = Machine(
        device=device_name(device),
        backend=communicator(device) if size > 1 else "",
        memory=accelerator_memory(device) or host_memory(per_node),
        nodes=size // per_node,
        devices_per_node=per_node,
        compute=compute,
        collectives=collectives,
        contention=contention,
        exchange_s=exchange,
        load=load,
    )
    leave()
    return found
