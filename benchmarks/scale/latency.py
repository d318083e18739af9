"""A network on this machine on which every packet takes as long as asked; needs root.

Packets between local processes leave through a TUN interface. A relay returns each one to the
kernel when its time has come. All of it is in a network namespace of its own.
"""

from __future__ import annotations

import ctypes
import fcntl
import multiprocessing
import os
import select
import struct
import subprocess
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.scale.cost import MissingError

INTERFACE, ADDRESS = "slow0", "10.77.0.1"
_DEVICE = Path("/dev/net/tun")
# From linux/sched.h and linux/if_tun.h.
_NEW_NETWORK = 0x40000000
_SET_INTERFACE, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000
_LARGEST_PACKET = 2**16


@contextmanager
def slow_network(latency_s: float) -> Iterator[None]:
    """Move this process to a namespace where packets to `ADDRESS` take `latency_s`."""
    if os.geteuid() or not _DEVICE.exists():
        raise MissingError(f"needs root and {_DEVICE}")
    if ctypes.CDLL(None, use_errno=True).unshare(_NEW_NETWORK):
        raise MissingError(f"needs a network namespace: {os.strerror(ctypes.get_errno())}")
    tun = os.open(_DEVICE, os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _SET_INTERFACE, struct.pack("16sH", INTERFACE.encode(), _TUN | _NO_HEADER))
    _route()
    relay = multiprocessing.get_context("fork").Process(target=_relay, args=(tun, latency_s))
    relay.start()
    try:
        yield
    finally:
        relay.kill()
        relay.join()
        os.close(tun)


def _route() -> None:
    """Send what local processes send to `ADDRESS` through the interface, and accept it there."""
    for name, value in {"rp_filter": "0", "accept_local": "1"}.items():
        for interface in ("all", INTERFACE):
            Path(f"/proc/sys/net/ipv4/conf/{interface}/{name}").write_text(value)
    for words in (
        "link set lo up",
        f"address add {ADDRESS}/32 dev {INTERFACE}",
        f"link set {INTERFACE} txqueuelen 10000 up",
        f"route add {ADDRESS}/32 dev {INTERFACE} table 77",
        # The kernel would deliver to its own address at once: that rule must come later.
        "rule add pref 200 lookup local",
        "rule del pref 0",
        f"rule add pref 100 iif lo to {ADDRESS} lookup 77",
    ):
        subprocess.run(["ip", *words.split()], check=True)


def _relay(tun: int, latency_s: float) -> None:
    held: deque[tuple[float, bytes]] = deque()
    while True:
        wait_s = max(0.0, held[0][0] - time.monotonic()) if held else None
        select.select([tun], [], [], wait_s)
        try:
            while True:
                packet = os.read(tun, _LARGEST_PACKET)
                held.append((time.monotonic() + latency_s, packet))
        except BlockingIOError:
            pass
        while held and held[0][0] <= time.monotonic():
            os.write(tun, held.popleft()[1])
