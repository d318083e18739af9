"""Run a command as the parent of every process that it leaves behind, and end with its exit code.

    python tests/reaper.py COMMAND ...

A process whose parent has ended belongs to the first process of the machine, which is told what
CPU time it took. Here it belongs to this process instead. So a worker of pytest reads what its
tests have left behind, the fork server of a run and its ranks for instance, from its parent.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys


def run(command: list[str]) -> int:
    """The exit code of the command; what it leaves behind is waited for until then."""
    become_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(become_subreaper, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "cannot become the parent of orphans")
    child = os.spawnvp(os.P_NOWAIT, command[0], command)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
