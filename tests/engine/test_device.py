"""What differs between kinds of devices; the same promises on GPUs are marked `cuda`."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from shardwise.pytorch import device as devices  # noqa: E402

CPU = torch.device("cpu")
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
KINDS = [CPU, pytest.param(torch.device("cuda", 0), marks=[pytest.mark.cuda, NO_GPU])]
each_device = pytest.mark.parametrize("device", KINDS, ids=lambda device: device.type)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A machine on which torch finds two accelerators of a kind, or none."""
    kind: str | None = request.param
    found = None if kind is None else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: found)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2 if found else 0)
    monkeypatch.setenv("LOCAL_RANK", "1")
    return kind or "cpu"


@pytest.mark.parametrize("machine", ["cuda", "xpu"], indirect=True)
def test_each_process_has_an_accelerator_of_its_own(machine: str) -> None:
    assert devices.local_device() == torch.device(machine, 1)
    assert devices.local_device("cpu") == CPU
    assert devices.accelerator_count() == 2


# An accelerator without a backend for collectives cannot train with others.
@pytest.mark.parametrize("machine", [None, "mps"], indirect=True)
def test_a_machine_without_accelerators_trains_on_its_cpu(machine: str) -> None:
    assert devices.local_device() == CPU
    assert (devices.accelerator(), devices.accelerator_count()) == (None, 0)
    assert devices.accelerator_names() == []


@pytest.mark.parametrize(
    ("kind", "backends", "communicator"),
    [
        ("cpu", "gloo", "gloo"),
        ("cuda", "cpu:gloo,cuda:nccl", "nccl"),
        ("xpu", "cpu:gloo,xpu:xccl", "xccl"),
    ],
)
def test_a_group_can_always_exchange_values_of_the_cpu(
    kind: str, backends: str, communicator: str
) -> None:
    assert devices.backends(kind) == backends
    assert devices.communicator(torch.device(kind)) == communicator
    if kind != "cpu":
        assert torch.distributed.get_default_backend_for_device(kind) == communicator


@each_device
def test_a_clock_measures_seconds(device: Any) -> None:
    now = devices.clock_of(device)
    moments = [now()]
    for _ in range(2):
        time.sleep(0.01)
        moments.append(now())
    pairs = list(itertools.pairwise(moments))
    assert all(seconds > 0.005 for seconds in devices.seconds_between(pairs))
    assert devices.seconds_between([]) == []


def test_a_clock_of_an_accelerator_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    waited = []

    class Event:
        def __init__(self, device: Any, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at = time.perf_counter()

        def synchronize(self) -> None:
            waited.append(self)

        def elapsed_time(self, end: Event) -> float:
            return 1e3 * (end.at - self.at)

    monkeypatch.setattr(torch, "Event", Event)
    now = devices.clock_of(torch.device("cuda", 0))
    moments = [now(), now(), now()]
    seconds = devices.seconds_between(list(itertools.pairwise(moments)))
    assert sum(seconds) == pytest.approx(moments[2].at - moments[0].at)
    assert waited == [moments[2]]


def test_the_allocator_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = {
        f"{kind}_bytes.all.{when}": value
        for (kind, when), value in {
            ("allocated", "current"): 1,
            ("allocated", "peak"): 3,
            ("reserved", "current"): 2,
            ("reserved", "peak"): 4,
        }.items()
    }
    monkeypatch.setattr(torch.accelerator, "memory_stats", lambda device: statistics)
    memory = devices.allocator_memory(torch.device("cuda", 0))
    assert memory == devices.DeviceMemory(
        allocated=1, peak_allocated=3, reserved=2, peak_reserved=4
    )


@each_device
def test_random_states_are_restored(device: Any) -> None:
    states = devices.random_states(device)
    drawn = torch.rand(4), torch.rand(4, device=device)
    devices.set_random_states(states, device)
    assert torch.equal(drawn[0], torch.rand(4))
    assert torch.equal(drawn[1], torch.rand(4, device=device)) or device == CPU


def test_the_random_state_of_another_device_is_ignored() -> None:
    states = {**devices.random_states(CPU), "cuda": torch.zeros(16, dtype=torch.uint8)}
    drawn = torch.rand(4)
    devices.set_random_states(states, CPU)
    assert torch.equal(torch.rand(4), drawn)


@each_device
def test_waiting_and_memory(device: Any) -> None:
    devices.use(device)
    devices.reset_peak_memory(device)
    tensor = torch.ones(1 << 20, device=device)
    devices.wait_for_stream(device)
    devices.synchronize(device)
    memory = devices.allocator_memory(device)
    assert (memory is None) == (device == CPU)
    if memory is not None:
        assert tensor.nbytes <= memory.allocated <= memory.peak_allocated <= memory.peak_reserved
        total = devices.accelerator_memory(device)
        assert total is not None
        assert memory.allocated <= memory.reserved <= total
    assert devices.device_name(device)
    assert (devices.accelerator_memory(device) is None) == (device == CPU)
    assert len(devices.profiled_activities(device)) == 1 + (device != CPU)


@pytest.mark.parametrize(
    ("message", "lost"),
    [
        ("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234", True),
        ("Rank 1 failed: Connection reset by peer", True),
        ("NCCL error in: x.cpp:1, remote process exited\nncclRemoteError: A call failed", True),
        ("CUDA error: an illegal memory access was encountered", False),
    ],
)
def test_a_lost_peer_is_recognised(message: str, lost: bool) -> None:
    assert devices.is_lost_peer(RuntimeError(message)) is lost


def test_settings_of_devices_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_DEBUG", "GLOO_SOCKET_IFNAME", "CUDA_VISIBLE_DEVICES", "UNRELATED"):
        monkeypatch.setenv(name, "1")
    devices.hide_accelerators()
    devices.connect_on_loopback()
    settings = devices.device_settings()
    assert settings["NCCL_DEBUG"] == "1"
    assert settings["GLOO_SOCKET_IFNAME"] == "1"  # what a user has set is kept
    assert settings["CUDA_VISIBLE_DEVICES"] == ""
    assert "UNRELATED" not in settings
