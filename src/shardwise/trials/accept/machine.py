"""The devices of this machine that are to be accepted."""

from __future__ import annotations

from typing import NamedTuple

from shardwise.spec.cluster import DeviceSpec

# Share of all cores that others may use while time is measured.
MAX_BUSY = 0.10


class Machine(NamedTuple):
    """Equal devices of one host, with one process for each. `memory_bytes` is of one device."""

    processes: int
    # As torch reports it.
    device: str
    backend: str
    memory_bytes: int
    is_cpu: bool
    # The device in the catalogue; None if it has no such device.
    known: DeviceSpec | None

    def __str__(self) -> str:
        one, several = ("process", "processes") if self.is_cpu else ("device", "devices")
        noun = one if self.processes == 1 else several
        through = f" over {self.backend}" if self.processes > 1 else ""
        return f"{self.device}, {self.processes} {noun}{through}"


def this_machine(processes: int | None, device: DeviceSpec | None = None) -> Machine:
    """`processes` devices of this machine; None takes all GPUs, or two CPU processes without one.

    `device` is the entry of the catalogue, recognised if None. Raises SpecError if there are fewer
    GPUs.
    """
    from shardwise.pytorch import device as engine
    from shardwise.spec.catalogue import find_device, host_memory
    from shardwise.spec.recognise import recognise
    from shardwise.spec.record import SpecError

    count = engine.accelerator_count()
    if processes is not None and 0 < count < processes:
        raise SpecError(f"--nproc: {processes} processes, but this machine has {count} GPUs")
    number = processes or count or 2
    here = engine.local_device()
    name = engine.device_name(here)
    memory = engine.accelerator_memory(here) or host_memory(number)
    known = device or (recognise(name, memory) if count else find_device("CPU"))
    return Machine(number, name, engine.communicator(here), memory, count == 0, known)
