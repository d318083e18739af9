"""What differs between the kinds of devices: CUDA (and ROCm), XPU, NPU and the CPU.

Nothing outside the engine names a kind of device or a backend of torch.distributed. Functions take
the torch.device of the process and use `torch.accelerator` where it has the function, else the
device's own module. It imports no other module of Shardwise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity

# The backend of torch.distributed for each kind of device that can train. ROCm is "cuda" in torch.
_BACKENDS = {"cuda": "nccl", "xpu": "xccl", "npu": "hccl"}
# Ranks also exchange small values and checkpoints over the CPU.
_HOST_BACKEND = "gloo"
_PROFILED = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
# How a collective fails when its peer died: Gloo and stores by socket, NCCL by its own error.
# A connection that was silent for too long, and one without a route, are lost as well.
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Connection timed out",
    "Connection was likely closed",
    "No route to host",
    "Network is unreachable",
    "Broken pipe",
    "ncclRemoteError",
)
# Environment variables that change how devices and backends work, and all with these prefixes.
_SETTINGS = ("CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_PREFIXES = ("NCCL_", "GLOO_", "TORCH_")

# ---- devices -------------------------------------------------------------------------------------


def accelerator() -> str | None:
    """The kind of accelerator to train on, such as "cuda"; None if the machine has none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and found.type in _BACKENDS else None


def accelerator_count() -> int:
    """The number of accelerators of this machine that can train."""
    return torch.accelerator.device_count() if accelerator() is not None else 0


def accelerator_names() -> list[str]:
    """The names of this machine's accelerators, in the order of their indices."""
    kind = accelerator() or "cpu"
    return [device_name(torch.device(kind, index)) for index in range(accelerator_count())]


def local_device(kind: str = "auto") -> torch.device:
    """The device of this process: its own accelerator, or the CPU."""
    if kind == "auto":
        kind = accelerator() or "cpu"
    if kind == "cpu":
        return torch.device(kind)
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))


def is_accelerator(device: torch.device) -> bool:
    """Whether the device is not the CPU: it runs asynchronously and has its own memory."""
    return device.type != "cpu"


def use(device: torch.device) -> None:
    """Make an accelerator the current one of this thread; a new thread starts on the first."""
    if is_accelerator(device):
        torch.accelerator.set_device_index(device)


def device_name(device: torch.device) -> str:
    if not is_accelerator(device):
        return "CPU"
    return str(torch.get_device_module(device).get_device_name(device))


# ---- work and time -------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait for all work on the device; on the CPU it is done when a call returns."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def wait_for_stream(device: torch.device) -> None:
    """Wait for the work of the current stream, such as copies to the host."""
    if is_accelerator(device):
        torch.accelerator.current_stream(device).synchronize()


def clock_of(device: torch.device) -> Callable[[], Any]:
    """A function that returns the current moment without waiting for the device.

    `seconds_between` reads the moments.
    """
    if not is_accelerator(device):
        return time.perf_counter

    def now() -> torch.Event:
        event = torch.Event(device, enable_timing=True)
        event.record()
        return event

    return now


def seconds_between(moments: Sequence[tuple[Any, Any]]) -> list[float]:
    """Seconds from the first to the second moment of each pair; waits for the last one."""
    if not moments or isinstance(moments[0][0], float):
        return [end - begin for begin, end in moments]
    moments[-1][1].synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in moments]


def profiled_activities(device: torch.device) -> list[ProfilerActivity]:
    """The activities to profile: calls of the host and, on an accelerator, its kernels."""
    if not is_accelerator(device):
        return [ProfilerActivity.CPU]
    return [ProfilerActivity.CPU, _PROFILED.get(device.type, ProfilerActivity.PrivateUse1)]


# ---- memory --------------------------------------------------------------------------------------


class DeviceMemory(NamedTuple):
    """Bytes that torch's allocator holds on a device, now and at the peak since the last reset."""

    allocated: int
    peak_allocated: int
    reserved: int
    peak_reserved: int


def allocator_memory(device: torch.device) -> DeviceMemory | None:
    """The statistics of torch's allocator; None on the CPU, where torch has none."""
    if not is_accelerator(device):
        return None
    # Each of torch's named functions would collect all statistics again.
    statistics = torch.accelerator.memory_stats(device)
    return DeviceMemory(
        *(
            int(statistics.get(f"{kind}_bytes.all.{when}", 0))
            for kind in ("allocated", "reserved")
            for when in ("current", "peak")
        )
    )


def reset_peak_memory(device: torch.device) -> None:
    if is_accelerator(device):
        torch.accelerator.reset_peak_memory_stats(device)


def accelerator_memory(device: torch.device) -> int | None:
    """Total bytes of an accelerator's memory; None for a CPU."""
    if not is_accelerator(device):
        return None
    return int(torch.get_device_module(device).get_device_properties(device).total_memory)


# ---- random numbers ------------------------------------------------------------------------------


def random_states(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of the CPU's generator and of the device's, by kind of device."""
    states = {"cpu": torch.get_rng_state()}
    if is_accelerator(device):
        states[device.type] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_states(states: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restore `random_states`; a state of another kind of device is ignored."""
    torch.set_rng_state(states["cpu"])
    if is_accelerator(device) and device.type in states:
        torch.get_device_module(device).set_rng_state(states[device.type], device)


# ---- processes -----------------------------------------------------------------------------------


def communicator(device: torch.device) -> str:
    """The backend of collectives on tensors of this device, such as 'nccl'."""
    return _BACKENDS.get(device.type, _HOST_BACKEND)


def backends(device_type: str) -> str:
    """The backends of a process group: for the CPU and, if any, for the accelerator.

    The CPU's is always included, so that ranks can exchange small values without the accelerator.
    """
    if device_type not in _BACKENDS:
        return _HOST_BACKEND
    return f"cpu:{_HOST_BACKEND},{device_type}:{_BACKENDS[device_type]}"


# Up to this many ranks, one group of all is as fast as a tree of groups, and all may be connected.
ONE_GROUP = 32


def connect_when_needed() -> None:
    """Let Gloo connect two ranks only when they exchange something, unless this is set.

    Otherwise the group of all N ranks costs each of them N sockets.
    """
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")


def host_group(ranks: list[int] | None = None) -> dist.ProcessGroup:
    """A new process group of some or all ranks, for tensors on the CPU; all ranks call this."""
    group: dist.ProcessGroup = dist.new_group(ranks, backend=_HOST_BACKEND)
    return group


class PeerFailedError(RuntimeError):
    """Another rank cannot continue, for its own reason."""


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because its peer died; torch has no exception type for it."""
    return isinstance(error, PeerFailedError) or any(words in str(error) for words in _LOST_PEER)


# ---- environment ---------------------------------------------------------------------------------


def device_settings() -> dict[str, str]:
    """Environment variables that change how devices and backends work."""
    return {k: v for k, v in os.environ.items() if k in _SETTINGS or k.startswith(_PREFIXES)}


def connect_on_loopback() -> None:
    """Let Gloo connect the processes of one machine on the loopback, unless this is set."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def connect_from(address: str) -> None:
    """Let Gloo connect over the interface that has this address, unless this is set."""
    import psutil

    for interface, found in psutil.net_if_addrs().items():
        if any(one.address == address for one in found):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def hide_accelerators() -> None:
    """Hide GPUs from processes that start from now on; they train on CPUs."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
