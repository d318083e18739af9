"""A rank of a run, forked from a process that has imported torch.

Imports take seconds, a fork takes milliseconds. Torch's launcher would start a new interpreter for
each rank and import everything again after each failure. Here one process per host, Python's fork
server, imports once; it starts no thread and touches no device, so that it can be forked safely.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from shardwise.train.launch import PARENT, signal_of_end

START_METHOD = "forkserver"
# A scheduler sends these to all processes of a job. The launcher and the ranks handle them; the
# processes between them would die of them, and nobody would learn how the ranks end.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# Torch imports its compiler when the first optimizer is created, compiled or not.
IMPORTED_ONCE = ["shardwise.train.run", "shardwise.report.train", "torch._dynamo"]
# For models of transformers. Its modeling_utils is not here: torchao, which it imports, looks at
# the properties of GPUs.
OF_TRANSFORMERS = ["transformers.masking_utils", "transformers.loss.loss_utils"]


@cache
def import_once(*, transformers: bool) -> dict[str, str]:
    """Start the process from which ranks are forked; return its environment, which stays."""
    # Torch then counts GPUs without a context, which could not be used after a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if transformers:
        # It reads this when it is imported, see shardwise.units.build.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    imported = [*IMPORTED_ONCE, *(OF_TRANSFORMERS if transformers else [])]
    multiprocessing.set_forkserver_preload([*imported, "shardwise.train.fork_server"])
    # Apart: Python itself unblocks SIGTERM once its tracker runs.
    for start in (resource_tracker.ensure_running, forkserver.ensure_running):
        with _blocked(STOP_SIGNALS):
            start()
    return dict(os.environ)


@contextlib.contextmanager
def _blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Block signals in processes that are started here; this one gets them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def variables_since(before: dict[str, str]) -> dict[str, str]:
    """The variables of this process that are not in the environment `before`, or differ."""
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def work(variables: dict[str, str], *arguments: str) -> None:
    """Run `shardwise` with `arguments` and more environment variables as one rank."""
    # Blocked in the process that this one was forked from.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "a rank is forked for a launcher"
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    # Ctrl-C in a terminal reaches all processes of its session. The launcher alone handles it.
    os.setsid()
    os.environ.update(variables)
    os.environ[PARENT] = str(os.getppid())
    _name_process(f"rank {os.environ['RANK']}")
    sys.argv = ["shardwise", *arguments]
    try:
        runpy.run_module("shardwise", run_name="__main__", alter_sys=True)
    finally:
        if not launcher.is_alive():
            sys.exit(1)  # torch would wait until the launcher has seen the end of this function


def _end_with(launcher: multiprocessing.process.BaseProcess) -> None:
    """End when the launcher dies; the kernel tells only of the death of the parent."""
    launcher.join()
    os.kill(os.getpid(), signal_of_end())


def _name_process(name: str) -> None:
    """Set the name that `ps` and `top` show: all ranks have the command line of their parent."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)
