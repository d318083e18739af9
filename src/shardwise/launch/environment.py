"""Environment variables that a launcher and its ranks share."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping
from typing import NamedTuple

from shardwise.spec.record import SpecError

FOLDER, PARENT = "SHARDWISE_RUN_FOLDER", "SHARDWISE_PARENT"
# Tells workers the `shardwise train` command that resumes the run.
RESUME_COMMAND = "SHARDWISE_RESUME_COMMAND"
HOSTS = "PET_NNODES"


def is_worker(environment: Mapping[str, str]) -> bool:
    """Whether a launcher has started this process as one of several ranks."""
    return "RANK" in environment and "WORLD_SIZE" in environment


class HostRange(NamedTuple):
    """The least and the most hosts that train together."""

    least: int
    most: int

    @property
    def is_elastic(self) -> bool:
        return self.least < self.most


def host_range(text: str | None = None) -> HostRange:
    """Parse a number of hosts, `4` or `1:4`.

    None reads PET_NNODES, the variable of torchrun, which is 1 if it is not set.
    """
    name = HOSTS if text is None else "--nnodes"
    text = os.environ.get(HOSTS, "1") if text is None else text
    found = re.fullmatch(r"(\d{1,6})(?::(\d{1,6}))?", text)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < least <= most:
        raise SpecError(f"{name}: {text!r} is neither a number of hosts nor a range such as 1:4")
    return HostRange(least, most)


def signal_of_end() -> signal.Signals:
    """The signal that ranks get when their launcher dies: SIGTERM on one host, else SIGKILL.

    On SIGTERM ranks save and stop, and those of other hosts would stop with them. After SIGKILL the
    other hosts only lose this one, and continue.
    """
    return signal.SIGTERM if host_range().most == 1 else signal.SIGKILL


def end_with_launcher() -> None:
    """Ask the kernel to send a signal to this process when its launcher dies, for any reason.

    PARENT names the launcher: in a container it may be process 1.
    """
    if not sys.platform.startswith("linux"):
        return
    import ctypes

    set_parent_death_signal = 1
    ctypes.CDLL(None, use_errno=True).prctl(set_parent_death_signal, signal_of_end())
    parent = int(os.environ.get(PARENT, os.getppid()))
    if os.getppid() != parent:  # the launcher died before the request
        os.kill(os.getpid(), signal_of_end())
