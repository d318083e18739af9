"""The process that ranks are forked from: what it imports must not prevent a fork."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from tests.command import PATIENCE_S, environment

pytest.importorskip("torch")

# A driver that was asked for its devices cannot be used after a fork, and a thread is not forked.
IMPORTS = """
import importlib, os
import torch

def refuse(*_):
    raise AssertionError("a device was looked for")

torch.cuda.is_available = torch.cuda.device_count = torch.cuda.init = refuse
torch.cuda._lazy_init = refuse
from shardwise.launch.worker import PRELOADED_MODULES, TRANSFORMERS_MODULES

for name in PRELOADED_MODULES + TRANSFORMERS_MODULES:
    importlib.import_module(name)
print(len(os.listdir("/proc/self/task")))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_what_is_imported_once_starts_no_thread_and_looks_for_no_device() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], env=environment(OMP_NUM_THREADS="1"),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"


def test_variables_set_after_the_imports_are_given_to_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from shardwise.launch.worker import variables_since

    monkeypatch.setenv("SAME", "1")
    monkeypatch.setenv("CHANGED", "before")
    before = dict(os.environ)
    monkeypatch.setenv("CHANGED", "after")
    monkeypatch.setenv("NEW", "yes")
    assert variables_since(before) == {"CHANGED": "after", "NEW": "yes"}


def test_a_rank_that_is_killed_after_its_end_does_not_block_the_launcher() -> None:
    """Ranks that are done wait for an event, and one is killed before it is set."""
    from shardwise.pytorch.private import UnblockedEvent

    context = multiprocessing.get_context("spawn")
    event: Any = context.Event()
    rank = context.Process(target=event.wait)
    rank.start()
    while event._cond._sleeping_count.get_value() < 1:
        time.sleep(0.01)
    rank.kill()
    rank.join()
    setting = threading.Thread(target=UnblockedEvent(event).set, daemon=True)
    setting.start()
    setting.join(PATIENCE_S)
    assert not setting.is_alive()
