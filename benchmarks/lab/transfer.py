"""Measured rate between two hosts, by a plain TCP transfer.

This file is also the program at both ends of the transfer, and runs without the project.
"""

from __future__ import annotations

import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.lab.network import Host

PORT = 5001
# Left out at the beginning, while TCP adapts and the burst allowance of the link is used up.
SETTLING_SHARE = 0.25


def transfer_rates(
    sender: Host, receiver: Host, seconds: float = 1.0, times: int = 3
) -> list[float]:
    """Bits of payload per second from `sender` to `receiver`, one value per transfer."""
    return [_one(sender, receiver, seconds) for _ in range(times)]


def transfer_rate(sender: Host, receiver: Host, seconds: float = 1.0, times: int = 3) -> float:
    """The median of `transfer_rates`."""
    return statistics.median(transfer_rates(sender, receiver, seconds, times))


def _one(sender: Host, receiver: Host, seconds: float) -> float:
    end = (sys.executable, "-S", str(Path(__file__).resolve()))
    listens = receiver.command(*end, "receive", receiver.address)
    with subprocess.Popen(listens, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # "ready"
        sends = sender.command(*end, "send", receiver.address, str(seconds))
        subprocess.run(sends, check=True, timeout=seconds + 30)
        return float(process.stdout.readline())


def receive(address: str) -> None:
    """Print a line when ready, and another with the rate in bits per second."""
    with socket.create_server((address, PORT)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
    buffer, total = bytearray(2**20), 0
    seen: list[tuple[float, int]] = []
    with connection:
        while count := connection.recv_into(buffer):
            total += count
            seen.append((time.perf_counter(), total))
    begin, end = seen[0][0], seen[-1][0]
    settled = begin + SETTLING_SHARE * (end - begin)
    first = next(moment for moment in seen if moment[0] >= settled)
    print((total - first[1]) * 8 / (end - first[0]))


def send(address: str, seconds: float) -> None:
    block = bytes(2**18)
    with socket.create_connection((address, PORT)) as connection:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            connection.sendall(block)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        send(sys.argv[2], float(sys.argv[3]))
