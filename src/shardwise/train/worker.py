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
import sys
import threading
from functools import cache
from multiprocessing import forkserver
from pathlib import Path

from shardwise.train.launch import PARENT, signal_of_end

START_METHOD = "forkserver"
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
    forkserver.ensure_running()
    return dict(os.environ)


def variables_since(before: dict[str, str]) -> dict[str, str]:
    """The variables of this process that are not in the environment `before`, or differ."""
    return {name: value for name, value in os.environ.items() if before.get(name) != value}


def work(variables: dict[str, str], *arguments: str) -> None:
    """Run `shardwise` with `arguments` and more environment variables as one rank."""
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
