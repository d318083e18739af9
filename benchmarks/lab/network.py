"""Hosts as network namespaces on one switch, each behind a link with a set rate.

    with hosts(2, 1e9) as (first, second):
        subprocess.run(first.command("ping", "-c", "1", second.address))
        set_rate([first, second], 250e6)

Nothing is created in the machine's own namespace, so removing the namespaces removes everything.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

PREFIX = "shardlab"
INTERFACE = "eth0"
# A name contains the id and the start time of the process that created it, because ids are reused.
_OWNER = re.compile(rf"{PREFIX}-.+-(\d+)\.(\d+)\.\d+-\w+")
_LABS = itertools.count()

# Jumbo frames, as in data centres: headers take 1 % of the rate, with less CPU work per byte.
MTU = 9000
# Burst allowance of a link after a pause. Long enough to keep the rate when a busy machine serves
# the link late, short enough that a transfer of a few megabytes is still limited.
BURST_S, LEAST_BURST = 4e-3, 64 * 1024
# For steps with many small messages and pauses between them, each of which would get the allowance.
SHORT_BURST_S = 0.5e-3
# How long a packet may wait for its link before it is dropped. In an all-to-all, every rank of a
# host sends to every rank of the others at once.
QUEUE_S, LONG_QUEUE_S = 20e-3, 200e-3


class Host(NamedTuple):
    """A host of the lab: processes started by `command` see only its loopback and its link.

    They run on the host's own cores, so that hosts do not slow each other down.
    """

    namespace: str
    address: str
    switch: str
    port: str
    cores: tuple[int, ...]

    def command(self, *words: str) -> list[str]:
        """Command line that runs a command on this host."""
        cores = ",".join(map(str, self.cores))
        return ["ip", "netns", "exec", self.namespace, "taskset", "-c", cores, *words]


def available() -> str | None:
    """None if a lab can be created here; otherwise the reason why not."""
    if os.geteuid() != 0:
        return "a lab needs root, to make network namespaces"
    for tool, package in (("ip", "iproute2"), ("tc", "iproute2"), ("taskset", "util-linux")):
        if shutil.which(tool) is None:
            return f"a lab needs the command {tool!r}, which {package} brings"
    try:
        with hosts(1, 1e9, "probe"):
            return None
    except subprocess.CalledProcessError as error:
        return f"a lab cannot be made here: {' '.join(error.cmd)!r} says {error.stderr.strip()!r}"


@contextmanager
def hosts(
    count: int, rate_bits_per_s: float | None, name: str = "lab", burst_s: float = BURST_S
) -> Iterator[list[Host]]:
    """Create `count` hosts on a switch; each link has the given rate per direction, or no limit.

    On exit, also after an error, processes on the hosts are killed and the hosts are removed.
    Leftovers of labs whose process was killed are removed first.
    """
    sweep()
    lab = f"{PREFIX}-{name}-{os.getpid()}.{_started(os.getpid())}.{next(_LABS)}"
    switch = f"{lab}-switch"
    made = [
        Host(
            f"{lab}-h{i}",
            f"10.77.{(i + 1) // 256}.{(i + 1) % 256}",
            switch,
            f"port{i}",
            _cores_of(i, count),
        )
        for i in range(count)
    ]
    with _end_on_signal():
        try:
            _build(switch, made)
            set_rate(made, rate_bits_per_s, burst_s)
            yield made
        finally:
            with _undisturbed():
                _remove([*(host.namespace for host in made), switch])


def _cores_of(number: int, count: int) -> tuple[int, ...]:
    """An equal share of this machine's cores; with too few cores, hosts share them."""
    cores = sorted(os.sched_getaffinity(0))
    share = len(cores) // count
    if share == 0:
        return (cores[number % len(cores)],)
    return tuple(cores[number * share : (number + 1) * share])


def _build(switch: str, made: Sequence[Host]) -> None:
    _run("ip", "netns", "add", switch)
    # "name" is explicit because ip reads some short names as abbreviated options.
    _run("ip", "-n", switch, "link", "add", "name", "switch0", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "switch0", "up")
    for host in made:
        space = host.namespace
        _run("ip", "netns", "add", space)
        _run("ip", "-n", space, "link", "set", "lo", "up")
        ends = ("type", "veth", "peer", "name", INTERFACE, "netns", space)
        _run("ip", "-n", switch, "link", "add", "name", host.port, *ends)
        mtu = ("mtu", str(MTU), "up")
        _run("ip", "-n", switch, "link", "set", host.port, "master", "switch0", *mtu)
        _run("ip", "-n", space, "address", "add", f"{host.address}/16", "dev", INTERFACE)
        _run("ip", "-n", space, "link", "set", INTERFACE, *mtu)


def set_rate(
    made: Sequence[Host],
    rate_bits_per_s: float | None,
    burst_s: float = BURST_S,
    queue_s: float = QUEUE_S,
) -> None:
    """Limit the links of these hosts to a rate in each direction, or lift the limit with None."""
    for host in made:
        # A queue limits what leaves a device: the host's device for what it sends, the switch's
        # port for what it receives.
        for space, device in ((host.namespace, INTERFACE), (host.switch, host.port)):
            if rate_bits_per_s is None:
                lift = ("tc", "-n", space, "qdisc", "del", "dev", device, "root")
                subprocess.run(lift, capture_output=True, check=False)  # there may be no limit
                continue
            burst = max(LEAST_BURST, round(rate_bits_per_s / 8 * burst_s))
            shape = ("tbf", "rate", f"{rate_bits_per_s:.0f}bit", "burst", f"{burst}b")
            queue = ("latency", f"{queue_s * 1e3:g}ms")
            _run("tc", "-n", space, "qdisc", "replace", "dev", device, "root", *shape, *queue)


def link_bytes(host: Host) -> tuple[int, int]:
    """Bytes sent and received by the host over its link, headers included."""
    shown = ("ip", "-n", host.namespace, "-s", "-j", "link", "show", INTERFACE)
    done = subprocess.run(shown, capture_output=True, text=True, check=True)
    counts = json.loads(done.stdout)[0]["stats64"]
    return counts["tx"]["bytes"], counts["rx"]["bytes"]


def sweep() -> list[str]:
    """Remove leftovers of labs whose process has ended; return the removed namespaces."""
    dead = []
    for space in _namespaces():
        owner = _OWNER.fullmatch(space)
        if owner is not None and _started(int(owner[1])) != int(owner[2]):
            dead.append(space)
    _remove(dead)
    return dead


def kill_processes(made: Sequence[Host], mark: str | None = None) -> None:
    """Kill the processes on these hosts; with `mark`, only those with it in their environment."""
    _kill([host.namespace for host in made], mark)


def processes_on(made: Sequence[Host]) -> list[int]:
    """Ids of the processes on these hosts."""
    return [pid for host in made for pid in _processes(host.namespace)]


def _kill(spaces: Sequence[str], mark: str | None = None, patience_s: float = 10.0) -> None:
    end = time.monotonic() + patience_s
    while time.monotonic() < end:
        found = [pid for space in spaces for pid in _processes(space) if _is_marked(pid, mark)]
        if not found:
            return
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.02)


def _processes(space: str) -> list[int]:
    listed = ("ip", "netns", "pids", space)
    done = subprocess.run(listed, capture_output=True, text=True, check=False)
    return [pid for pid in map(int, done.stdout.split()) if not _is_zombie(pid)]


def _is_marked(pid: int, mark: str | None) -> bool:
    if mark is None:
        return True
    try:
        return mark.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


def _is_zombie(pid: int) -> bool:
    fields = _stat(pid)
    return not fields or fields[0] == "Z"


def _started(pid: int) -> int | None:
    """Start time of a process in kernel ticks; None if it has ended."""
    fields = _stat(pid)
    return int(fields[19]) if fields and fields[0] != "Z" else None


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat after the command, which may itself contain spaces."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _namespaces() -> list[str]:
    done = subprocess.run(("ip", "netns", "list"), capture_output=True, text=True, check=False)
    return [line.split()[0] for line in done.stdout.splitlines() if line.startswith(PREFIX)]


def _remove(spaces: Sequence[str]) -> None:
    _kill(spaces)
    for space in spaces:
        subprocess.run(("ip", "netns", "del", space), capture_output=True, check=False)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)


@contextmanager
def _end_on_signal() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise an exception, as Ctrl-C does, so that cleanup runs."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with ExitStack() as restore:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGHUP):
                if signal.getsignal(number) is signal.SIG_DFL:
                    restore.callback(signal.signal, number, signal.signal(number, leave))
        yield


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Block signals until everything is removed, also a second Ctrl-C."""
    held = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
