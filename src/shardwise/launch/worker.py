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

from shardwise.launch.environment import PARENT, signal_of_end
from shardwise.spec.hub import stay_offline

START_METHOD = "forkserver"
# A scheduler sends these to all processes of a job. The launcher and the ranks handle them; the
# processes between them would die of them, and nobody would learn how the ranks end.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# Torch imports its compiler when the first optimizer is created, compiled or not.
PRELOADED_MODULES = ["shardwise.trainer.run", "shardwise.report.train", "torch._dynamo"]
# Imported too for models of transformers. Without modeling_utils: it imports torchao, which reads
# the properties of GPUs.
TRANSFORMERS_MODULES = ["transformers.masking_utils", "transformers.loss.loss_utils"]


@cache
def start_fork_server(*, transformers: bool) -> dict[str, str]:
    """Start the process from which ranks are forked; return its environment.

    Variables that are set later do not reach that process.
    """
    # Torch then counts GPUs without a context, which could not be used after a fork.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    if transformers:
        # transformers reads a variable when it is imported, see shardwise.pytorch.build.
        stay_offline()
    imported = [*PRELOADED_MODULES, *(TRANSFORMERS_MODULES if transformers else [])]
    multiprocessing.set_forkserver_preload([*imported, "shardwise.launch.fork_server"])
    # One by one: Python itself unblocks SIGTERM once its resource tracker runs.
    for start in (resource_tracker.ensure_running, forkserver.ensure_running):
        with _blocked(STOP_SIGNALS):
            start()
    return dict(os.environ)


@contextlib.contextmanager
def _blocked(signals: Iterable[signal.Signals]) -> Iterator[None]:
    """Block signals in processes started inside the context; this process gets them afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def variables_since(before: dict[str, str]) -> dict[str, str]:
    """Environment variables that are new or have changed since the environment `before`."""
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def work(variables: dict[str, str], *arguments: str) -> None:
    """Run `shardwise` with `arguments` as one rank, with `variables` added to the environment."""
    # These signals are blocked in the process that this one was forked from.
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
    """End this process when the launcher dies: the kernel only tells of the parent's death."""
    launcher.join()
    os.kill(os.getpid(), signal_of_end())


def _name_process(name: str) -> None:
    """Set the name that `ps` and `top` show, since all ranks share a command line."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name)
